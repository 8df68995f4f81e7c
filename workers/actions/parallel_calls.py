"""Calls many engines in parallel and waits for all together, so that an engine that hangs does not delay the others.

Each engine has at most one thread. A call that is late continues; its result is returned the next time, and its engine
is not called again until then. Engines that failed or were late the last time are called after all others, in turn,
with half as many threads, and are waited for only briefly. So an unreachable engine costs one wait, not one each time.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Hashable, Mapping
from concurrent.futures import FIRST_COMPLETED, Future, wait
from typing import TypeVar

K = TypeVar("K", bound=Hashable)
T = TypeVar("T")

AT_ONCE = 32
PATIENCE_S = 0.05  # wait for engines that failed or were late the last time; one that is back answers within it
FRESH_S = 5.0  # a result older than this is dropped, since this process may have been busy for minutes


class Asker:
    """Makes parallel calls for the tasks of one process. Not thread-safe. Each call must end at some time by itself,
    and may end after `ask` has returned.

    At most `at_once` threads for engines that respond, and twice as many in total.
    """

    def __init__(self, at_once: int = AT_ONCE, patience_s: float = PATIENCE_S, fresh_s: float = FRESH_S) -> None:
        self._at_once, self._patience_s, self._fresh_s = at_once, patience_s, fresh_s
        self._begun: dict[Hashable, float] = {}  # when each call of `_open` began
        self._open: dict[Hashable, Future[object]] = {}  # in progress, or ended and not returned yet
        self._silent: dict[Hashable, float] = {}  # by engine that failed or was late: when it was last called
        self._good: set[Hashable] = set()  # engines that responded the last time

    def silent(self, key: Hashable) -> bool:
        """Whether the engine failed or was late the last time."""
        return key in self._silent

    def ask(self, calls: Mapping[K, Callable[[], T]], within_s: float) -> dict[K, Future[T]]:
        """Make the calls. Returns after at most `within_s` with the futures of those that have ended; calls that have
        not are missing."""
        began, answered = time.monotonic(), dict[K, Future[T]]()
        self._forget(calls)
        silent = set(self._silent)
        waiting = sorted(calls.keys() - self._open.keys(), key=self._rank)
        while True:
            answered |= self._over(calls)
            waiting = self._begin(waiting, calls, silent)
            ours = [key for key in self._open if key in calls]
            patience_s = within_s if any(key not in silent for key in (*ours, *waiting)) else self._patience_s
            left = began + min(within_s, patience_s) - time.monotonic()
            if (not ours and not waiting) or left <= 0:
                break
            wait([future for future in self._open.values() if not future.done()], left, FIRST_COMPLETED)
        self._remember(calls, answered)
        return answered

    def _rank(self, key: Hashable) -> tuple[bool, float]:
        """Sort key: engines that responded, then unknown ones, then silent ones by the time of their last call."""
        return key not in self._good, self._silent.get(key, 0.0)

    def _begin(self, waiting: list[K], calls: Mapping[K, Callable[[], T]], silent: set[Hashable]) -> list[K]:
        """Start calls while threads are free; returns those that still wait for one."""
        running = [key for key, future in self._open.items() if not future.done()]
        slow = sum(key in silent for key in running)
        quick, most, rest = len(running) - slow, 2 * self._at_once, list[K]()
        for key in waiting:
            full = slow >= self._at_once // 2 if key in silent else quick >= self._at_once or slow + quick >= most
            if full:
                rest.append(key)
                continue
            future: Future[object] = Future()
            self._open[key] = future
            self._begun[key] = time.monotonic()
            threading.Thread(target=_call, args=(calls[key], future), name=f"ask-{key}", daemon=True).start()
            slow, quick = slow + (key in silent), quick + (key not in silent)
        return rest

    def _over(self, calls: Mapping[K, Callable[[], T]]) -> dict[K, Future[T]]:
        done = [key for key in calls if key in self._open and self._open[key].done()]
        return {key: self._open.pop(key) for key in done}  # type: ignore[misc]

    def _remember(self, calls: Mapping[K, Callable[[], T]], answered: Mapping[K, Future[T]]) -> None:
        now = time.monotonic()
        for key in calls:
            if key in answered and answered[key].exception() is None:
                self._silent.pop(key, None)
                self._good.add(key)
            elif key in answered or key in self._open:
                self._silent[key] = now
                self._good.discard(key)

    def _forget(self, calls: Mapping[K, object]) -> None:
        """Drop engines that are not called any more and results that are too old. A thread that still runs is counted
        until it ends."""
        self._good &= calls.keys()
        self._silent = {key: at for key, at in self._silent.items() if key in calls}
        stale = time.monotonic() - self._fresh_s
        self._open = {
            key: future
            for key, future in self._open.items()
            if not future.done() or (key in calls and self._begun[key] >= stale)
        }
        self._begun = {key: at for key, at in self._begun.items() if key in self._open}


def _call(call: Callable[[], T], future: Future[T]) -> None:
    try:
        future.set_result(call())
    except BaseException as error:
        future.set_exception(error)
