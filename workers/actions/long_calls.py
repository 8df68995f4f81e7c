"""Calls to engines that take minutes, in threads of this process: a task asks what became of one and goes on.

The thread ends with its process. Whoever looks next then makes the call again, so only calls that may be made twice
one after the other belong here. While one is under way its process leaves a mark at each look, for other workers.
"""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from typing import Any

FRESH_S = 15.0  # another worker's call that was heard of so lately goes on


@dataclass(slots=True)
class LongCall:
    """`error`: what it raised, once `done`."""

    done: bool = False
    seconds: float = 0.0
    error: Exception | None = None


class LongCalls:
    """By key; one thread each. `threads` False: a call is made at once and waited for."""

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
    """Whose calls they are, for other workers to read."""
    return f"{socket.gethostname()}:{os.getpid()}"


def call_mark() -> dict[str, Any]:
    """That this process' call was under way just now, to be stored with what it is for."""
    return {"by": this_process(), "at": time.time()}


def goes_on_elsewhere(mark: Mapping[str, Any] | None) -> bool:
    """Another process has said so lately."""
    return mark is not None and mark["by"] != this_process() and time.time() - mark["at"] < FRESH_S


def _make(held: LongCall, call: Callable[[], None]) -> None:
    began = time.monotonic()
    try:
        call()
    except Exception as error:
        held.error = error
    held.seconds = time.monotonic() - began
    held.done = True
