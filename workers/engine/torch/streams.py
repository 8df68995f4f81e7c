"""What steps, copies and transfers of one CUDA device must not make each other wait for. Nothing of it is on a CPU.

All of torch's work without a stream of its own queues in one line for each device: operators of steps do, so a copy or
a transfer in that line would hold up each step behind it, and be held up by all that is queued before.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal, Protocol

import torch

Purpose = Literal["kv", "identity", "digests", "copies", "transfer"]
# What the engine's loop itself waits for. Streams of a priority come from a pool of 32 that everything in the process
# draws from in turn, and the oldest is handed out again: NCCL draws one of the usual priority for each transfer, and a
# read of KV in one line with that would hold up the loop until the weights of a slow peer have come.
OF_THE_LOOP: frozenset[Purpose] = frozenset({"kv", "identity"})
URGENT, USUAL = -1, 0


class DeviceMark(Protocol):
    """A place in a device's work."""

    def query(self) -> bool:
        """The work before it is done."""
        ...


class _Now:
    def query(self) -> bool:
        return True


_NOW = _Now()


def mark(device: torch.device) -> DeviceMark:
    """Behind what has been queued by now."""
    if device.type != "cuda":
        return _NOW
    event = torch.cuda.Event()
    event.record(torch.cuda.current_stream(device))  # by default it would be on whichever device is the current one
    return event


class StreamPool:
    """Streams that were made, for the next who needs one for the same; from any thread. Only what goes on at the same
    time has several: two transfers in one line would wait for each other's peers."""

    def __init__(self) -> None:
        self._free: dict[tuple[torch.device, Purpose], list[torch.cuda.Stream]] = {}
        self._changing = threading.Lock()

    @contextmanager
    def one(self, device: torch.device, purpose: Purpose) -> Iterator[torch.cuda.Stream]:
        """Nobody else's meanwhile, nor later if something is stuck in it: whoever came next would wait for that."""
        with self._changing:
            free = self._free.setdefault((device, purpose), [])
            stream = free.pop() if free else None
        if stream is None:
            stream = torch.cuda.Stream(device, priority=URGENT if purpose in OF_THE_LOOP else USUAL)
        try:
            yield stream
        finally:
            if _idle(stream):
                with self._changing:
                    free.append(stream)


def _idle(stream: torch.cuda.Stream) -> bool:
    try:
        return bool(stream.query())
    except RuntimeError:  # the device is lost: what failed first is what is to be said
        return False


_KEPT = StreamPool()


@contextmanager
def beside(device: torch.device, *, behind: bool, purpose: Purpose = "kv") -> Iterator[None]:
    """What is done within runs beside the steps, and is done at the end. `behind`: only after all that is queued now,
    which what it reads may need; without, for memory that no queued work writes. `purpose`: what else it may have to
    wait for, which is what was begun before for the same."""
    if device.type != "cuda":
        yield
        return
    with _KEPT.one(device, purpose) as stream:
        if behind:
            stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(stream):
            yield
        stream.synchronize()
