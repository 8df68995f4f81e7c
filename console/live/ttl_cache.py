"""A cache of one value with a time to live: many dashboards poll the same figures of the last hour and 24 hours."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")


class TtlCache(Generic[T]):
    """Makes a value at most once every `kept_s` seconds in this process; until then callers get the last one.

    One caller makes a new value while others wait for it. An error is raised to that caller only and not cached.
    """

    def __init__(self, kept_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self.kept_s = kept_s
        self._clock = clock
        self._lock = threading.Lock()
        self._made: tuple[float, T] | None = None

    def get(self, make: Callable[[], T]) -> T:
        with self._lock:
            now = self._clock()
            if self._made is None or now - self._made[0] >= self.kept_s:
                self._made = (now, make())
            return self._made[1]

    def last(self) -> T | None:
        """What was made last, however long ago. None: nothing yet."""
        return None if self._made is None else self._made[1]
