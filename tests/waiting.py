"""Waiting for something that another process, thread or task brings about.

A test on a busy machine waits as long as it must, so bounds are generous: they only end a test that will never pass.
"""

from __future__ import annotations

import asyncio
import inspect
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

T = TypeVar("T")
What = str | Callable[[], object]  # for the failure; called only then


def until(condition: Callable[[], T], within_s: float = 30.0, *, every_s: float = 0.05, what: What = "") -> T:
    """The first true value of `condition`, asked every `every_s`. Raises AssertionError after `within_s`."""
    give_up_at = time.monotonic() + within_s
    while not (value := condition()):
        assert time.monotonic() < give_up_at, _late(within_s, what)
        time.sleep(every_s)
    return value


async def until_on_loop(
    condition: Callable[[], T | Awaitable[T]], within_s: float = 30.0, *, every_s: float = 0.001, what: What = ""
) -> T:
    """As `until`, while the event loop goes on; `condition` may be a coroutine function."""
    give_up_at = time.monotonic() + within_s
    while True:
        found = condition()
        value: T = await found if inspect.isawaitable(found) else found  # type: ignore[assignment]
        if value:
            return value
        assert time.monotonic() < give_up_at, _late(within_s, what)
        await asyncio.sleep(every_s)


def _late(within_s: float, what: What) -> str:
    said = what() if callable(what) else what
    return f"not within {within_s:g} s: {said}" if said else f"not within {within_s:g} s"
