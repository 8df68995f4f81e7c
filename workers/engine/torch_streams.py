"""What steps, copies and transfers of one CUDA device must not make each other wait for. Nothing of it is on a CPU.

All of torch's work without a stream of its own queues in one line for each device: operators of steps do, so a copy or
a transfer in that line would hold up each step behind it, and be held up by all that is queued before.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

import torch


class Mark(Protocol):
    """A place in a device's work."""

    def query(self) -> bool:
        """The work before it is done."""
        ...


class _Now:
    def query(self) -> bool:
        return True


_NOW = _Now()


def mark(device: torch.device) -> Mark:
    """Behind what has been queued by now."""
    if device.type != "cuda":
        return _NOW
    event = torch.cuda.Event()
    event.record(torch.cuda.current_stream(device))  # by default it would be on whichever device is the current one
    return event


@contextmanager
def beside(device: torch.device, *, behind: bool) -> Iterator[None]:
    """What is done within runs beside the steps, and is done at the end. `behind`: only after all that is queued now,
    which what it reads may need; without, for memory that no queued work writes."""
    if device.type != "cuda":
        yield
        return
    stream = torch.cuda.Stream(device)
    if behind:
        stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        yield
    stream.synchronize()
