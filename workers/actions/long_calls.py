"""Calls to engines that take minutes. Each runs in a thread of this process, and tasks check whether it has ended.

The thread ends with its process, and the next worker then makes the call again, so calls must be idempotent. While a
call is in progress, its process stores a mark with the action (`call_mark`), so that no other worker makes it too.
"""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from typing import Any

FRESH_S = 15.0  # a call of another worker counts as in progress for this long after its last mark


@dataclass(slots=True)
class LongCall:
    """`seconds`, `error`: how long the call took and what it raised, once `done`."""

    done: bool = False
    seconds: float = 0.0
    error: Exception | None = None


class LongCalls:
    """Calls by key, each in a thread. `threads` False: `begin` makes the call itself and returns when it has ended."""

    def __init__(self, *, threads: bool = True) -> None:
        self._threads = threads
        self._calls: dict[Hashable, LongCall] = {}

    def find(self, key: Hashable) -> LongCall | None:
        return self._calls.get(key)

    def begin(self, key: Hashable, call: Callable[[], None]) -> LongCall:
        held = self._calls[key] = LongCall()
        if self._threads:
            threading.Thread(target=_make, args=(held, call), name=f"call-{key}", daemon=True).start()
        else:
            _make(held, call)
        return held

    def forget(self, key: Hashable) -> None:
        self._calls.pop(key, None)


def this_process() -> str:
    """The name of this process in marks."""
    return f"{socket.gethostname()}:{os.getpid()}"


def call_mark() -> dict[str, Any]:
    """A mark that a call of this process is in progress now, to store with its action."""
    return {"by": this_process(), "at": time.time()}


def in_progress_elsewhere(mark: Mapping[str, Any] | None) -> bool:
    """Whether another process marked the call as in progress a short while ago."""
    return mark is not None and mark["by"] != this_process() and time.time() - mark["at"] < FRESH_S


def _make(held: LongCall, call: Callable[[], None]) -> None:
    began = time.monotonic()
    try:
        call()
    except Exception as error:
        held.error = error
    held.seconds = time.monotonic() - began
    held.done = True
