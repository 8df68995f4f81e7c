"""CUDA streams, so that steps, copies and transfers of one device do not wait for each other. On a CPU they do nothing.

Torch's work without an explicit stream goes to one default stream for each device. The operators of steps do, so a copy
or a transfer on it would delay every later step, and would wait for all work queued before it.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal, Protocol

import torch

Purpose = Literal["kv", "identity", "digests", "copies", "transfer"]
# Work that the event loop itself waits for. The streams of a priority come from a pool of 32, which the whole process
# shares round robin. NCCL takes a stream of the usual priority for each transfer, and a read of KV on the same stream
# would block the event loop until the weights of a slow peer have arrived.
OF_THE_LOOP: frozenset[Purpose] = frozenset({"kv", "identity"})
URGENT, USUAL = -1, 0


class DeviceMark(Protocol):
    """A position in a device's queued work."""

    def query(self) -> bool:
        """Whether the work before it is done."""
        ...


class _Now:
    def query(self) -> bool:
        return True


_NOW = _Now()


def mark(device: torch.device) -> DeviceMark:
    """A mark after all work queued until now."""
    if device.type != "cuda":
        return _NOW
    event = torch.cuda.Event()
    event.record(torch.cuda.current_stream(device))  # the default would be the stream of the current device
    return event


class StreamPool:
    """Reuses streams of the same device and purpose. Thread-safe. Concurrent uses get separate streams, since two
    transfers on one stream would wait for each other's peers."""

    def __init__(self) -> None:
        self._free: dict[tuple[torch.device, Purpose], list[torch.cuda.Stream]] = {}
        self._changing = threading.Lock()

    @contextmanager
    def one(self, device: torch.device, purpose: Purpose) -> Iterator[torch.cuda.Stream]:
        """A stream for exclusive use. It is reused later unless work is stuck in it, which the next user would wait
        for."""
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
    except RuntimeError:  # the device is lost, and the first error is the one to report
        return False


_KEPT = StreamPool()


@contextmanager
def beside(device: torch.device, *, behind: bool, purpose: Purpose = "kv") -> Iterator[None]:
    """Context manager that runs its work on a stream of its own, concurrently with steps, and waits for it at the end.
    `behind`: start after all work queued now, whose results it may read; without it, only for memory that no queued
    work writes. `purpose`: work of the same purpose may share a stream."""
    if device.type != "cuda":
        yield
        return
    with _KEPT.one(device, purpose) as stream:
        if behind:
            stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(stream):
            yield
        stream.synchronize()
