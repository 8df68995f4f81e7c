"""Cancellations of asyncio tasks that a library loses."""

from __future__ import annotations

import asyncio


def cancellations() -> int:
    """How often the running task was asked to end."""
    task = asyncio.current_task()
    return task.cancelling() if task else 0


def heed(before: int) -> None:
    """Raise CancelledError if the task was cancelled since it had `before` cancellations. asyncio.wait_for, in which
    the Redis client sends, loses one that comes as it ends (before Python 3.12): a loop that called Redis until it is
    cancelled went on."""
    if cancellations() > before:
        raise asyncio.CancelledError
