"""Calls many engines in parallel and waits for all together, so that an engine that hangs does not delay the others.

Each engine has at most one call. A call that is late continues; its result is returned the next time, and its engine
is not called again until then. Engines that failed or were late the last time are called after all others, in turn,
half as many at once, and are waited for only briefly. So an unreachable engine costs one wait, not one each time.

`ThreadCalls` makes calls that block, each in a thread; `LoopCalls` makes those of `kept_calls` in the event loop of
`call_loop`, which costs a tenth.
"""

from __future__ import annotations

import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Awaitable, Callable, Hashable, Mapping, Sequence
from concurrent.futures import Future
from queue import Empty, SimpleQueue
from typing import Any, TypeVar

from workers.http.call_loop import LOOP

K = TypeVar("K", bound=Hashable)
T = TypeVar("T")
Begun = tuple[Hashable, Callable[[], Any], Future[Any]]

AT_ONCE = 32
AT_ONCE_IN_LOOP = 64  # without threads, but the time of each call runs while the loop is busy with the others
PATIENCE_S = 0.05  # wait for engines that failed or were late the last time; one that is back answers within it
FRESH_S = 5.0  # a result older than this is dropped, since this process may have been busy for minutes


class _ParallelCalls(ABC):
    """Makes parallel calls for the tasks of one process. Not thread-safe. Each call must end at some time by itself,
    and may end after `ask` has returned.

    At most `at_once` calls to engines that respond, and twice as many in total.
    """

    def __init__(self, at_once: int, patience_s: float, fresh_s: float) -> None:
        self._at_once, self._patience_s, self._fresh_s = at_once, patience_s, fresh_s
        self._begun: dict[Hashable, float] = {}  # when each call of `_open` began
        self._open: dict[Hashable, Future[Any]] = {}  # in progress, or ended and not returned yet
        self._silent: dict[Hashable, float] = {}  # by engine that failed or was late: when it was last called
        self._good: set[Hashable] = set()  # engines that responded the last time
        self._ended: SimpleQueue[Hashable] = SimpleQueue()  # whose call has ended, for `_wait` alone

    @abstractmethod
    def _start(self, begun: Sequence[Begun]) -> None:
        """Make the calls, and return at once."""

    def silent(self, key: Hashable) -> bool:
        """Whether the engine failed or was late the last time."""
        return key in self._silent

    def _ask(self, calls: Mapping[K, Callable[[], Any]], within_s: float) -> dict[K, Future[Any]]:
        began, answered = time.monotonic(), dict[K, Future[Any]]()
        self._forget(calls)
        silent = set(self._silent)
        order = sorted(calls.keys() - self._open.keys(), key=self._rank)
        quick = deque(key for key in order if key not in silent)
        slow = deque(key for key in order if key in silent)
        ended: set[Hashable] = set(self._open)
        while True:
            for key in calls.keys() & ended:
                if key in self._open and self._open[key].done():
                    answered[key] = self._open.pop(key)
            self._begin(quick, slow, calls, silent)
            ours = [key for key in self._open if key in calls]
            patience_s = within_s if quick or any(key not in silent for key in ours) else self._patience_s
            left = began + min(within_s, patience_s) - time.monotonic()
            if (not ours and not quick and not slow) or left <= 0:
                break
            ended = self._wait(left)
        self._remember(calls, answered)
        return answered

    def _rank(self, key: Hashable) -> tuple[bool, float]:
        """Sort key: engines that responded, then unknown ones, then silent ones by the time of their last call."""
        return key not in self._good, self._silent.get(key, 0.0)

    def _begin(
        self, quick: deque[K], slow: deque[K], calls: Mapping[K, Callable[[], Any]], silent: set[Hashable]
    ) -> None:
        """Start calls while there is room: of `quick`, then of the silent engines of `slow`."""
        running = [key for key, future in self._open.items() if not future.done()]
        slow_now = sum(key in silent for key in running)
        quick_now, now = len(running) - slow_now, time.monotonic()
        begun: list[Begun] = []
        while quick and quick_now < self._at_once and quick_now + slow_now < 2 * self._at_once:
            begun.append(self._opened(quick.popleft(), calls, now))
            quick_now += 1
        while slow and slow_now < self._at_once // 2:
            begun.append(self._opened(slow.popleft(), calls, now))
            slow_now += 1
        if begun:
            self._start(begun)

    def _opened(self, key: K, calls: Mapping[K, Callable[[], Any]], now: float) -> Begun:
        future: Future[Any] = Future()
        future.add_done_callback(lambda _: self._ended.put(key))
        self._open[key], self._begun[key] = future, now
        return key, calls[key], future

    def _wait(self, left_s: float) -> set[Hashable]:
        """Wait for the end of a call, and tell whose ended."""
        ended: set[Hashable] = set()
        try:
            ended.add(self._ended.get(timeout=left_s))
            while True:
                ended.add(self._ended.get_nowait())
        except Empty:
            return ended

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
        """Drop engines that are not called any more and results that are too old. A call that still runs is counted
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


class ThreadCalls(_ParallelCalls):
    """Each call has a thread, so it may block."""

    def __init__(self, at_once: int = AT_ONCE, patience_s: float = PATIENCE_S, fresh_s: float = FRESH_S) -> None:
        super().__init__(at_once, patience_s, fresh_s)

    def ask(self, calls: Mapping[K, Callable[[], T]], within_s: float) -> dict[K, Future[T]]:
        """Make the calls. Returns after at most `within_s` with the futures of those that have ended; calls that have
        not are missing."""
        return self._ask(calls, within_s)

    def _start(self, begun: Sequence[Begun]) -> None:
        for key, call, future in begun:
            threading.Thread(target=_call, args=(call, future), name=f"ask-{key}", daemon=True).start()


class LoopCalls(_ParallelCalls):
    """All calls share the event loop of this process, so none may block."""

    def __init__(
        self, at_once: int = AT_ONCE_IN_LOOP, patience_s: float = PATIENCE_S, fresh_s: float = FRESH_S
    ) -> None:
        super().__init__(at_once, patience_s, fresh_s)

    def ask(self, calls: Mapping[K, Callable[[], Awaitable[T]]], within_s: float) -> dict[K, Future[T]]:
        """As `ThreadCalls.ask`, with what the calls' awaitables return or raise."""
        return self._ask(calls, within_s)

    def _start(self, begun: Sequence[Begun]) -> None:
        LOOP.start([(call, future) for _, call, future in begun])


def _call(call: Callable[[], T], future: Future[T]) -> None:
    try:
        future.set_result(call())
    except BaseException as error:
        future.set_exception(error)
