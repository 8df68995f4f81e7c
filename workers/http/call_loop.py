"""An event loop in a thread of its own, for jobs, which are synchronous. It is kept between jobs, and with it the
connections of `kept_calls`."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

T = TypeVar("T")

LOOKUPS = 256  # of names at once, each in a thread; calls are bounded by who makes them


class CallLoop:
    """Starts with its first call, also in a process that was forked from one that had called. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    def run(self, call: Coroutine[Any, Any, T]) -> T:
        """Wait for the call, and return or raise what it does."""
        return asyncio.run_coroutine_threadsafe(call, self._running()).result()

    def start(self, calls: Sequence[tuple[Callable[[], Awaitable[Any]], Future[Any]]]) -> None:
        """Make the calls at the same time; each future gets what its call returns or raises."""
        self._running().call_soon_threadsafe(_begin, calls)

    def _running(self) -> asyncio.AbstractEventLoop:
        with self._lock:
            if self._loop is None or self._thread is None or not self._thread.is_alive():
                self._loop = asyncio.new_event_loop()
                self._loop.set_default_executor(ThreadPoolExecutor(LOOKUPS, "look-up"))
                self._thread = threading.Thread(target=self._loop.run_forever, name="call-loop", daemon=True)
                self._thread.start()
            return self._loop


LOOP = CallLoop()
_TASKS: set[asyncio.Task[None]] = set()  # a loop keeps no reference to its tasks


def _begin(calls: Sequence[tuple[Callable[[], Awaitable[Any]], Future[Any]]]) -> None:
    for call, future in calls:
        task = asyncio.ensure_future(_call(call, future))
        _TASKS.add(task)
        task.add_done_callback(_TASKS.discard)


async def _call(call: Callable[[], Awaitable[Any]], future: Future[Any]) -> None:
    try:
        future.set_result(await call())
    except BaseException as error:
        future.set_exception(error)
