"""Blocking calls off the loop: one daemon thread, one call at a time, each abandoned after a time limit.

A thread that hangs in a call (a stopped database) cannot be ended. Further calls fail at once with Busy until it
returns, or until `abandon_s`, when a new thread replaces it. Daemon threads never delay the exit of the process, which
is why this is not a ThreadPoolExecutor.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any, TypeVar

T = TypeVar("T")


class Busy(Exception):
    """The thread still hangs in an earlier call."""


class OffLoop:
    """`abandon_s`: seconds after which a hanging thread is replaced."""

    def __init__(self, name: str, abandon_s: float = 60.0) -> None:
        self._name = name
        self._abandon_s = abandon_s
        self._jobs: SimpleQueue[Callable[[], None] | None] | None = None
        self._started_at: float | None = None  # of the running call

    @property
    def hanging_s(self) -> float:
        return 0.0 if self._started_at is None else time.monotonic() - self._started_at

    async def call(self, work: Callable[[], T], timeout_s: float) -> T:
        """Raises Busy, TimeoutError, or what `work` raised."""
        if self._started_at is not None:
            if self.hanging_s < self._abandon_s:
                raise Busy(f"{self._name} has been waiting for {self.hanging_s:.1f} s")
            self.close()
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[T] = loop.create_future()
        jobs = self._thread()
        self._started_at = time.monotonic()
        jobs.put(lambda: self._run(work, answer, loop, jobs))
        async with asyncio.timeout(timeout_s):
            return await asyncio.shield(answer)

    def close(self) -> None:
        """Let the thread go; it ends when its call returns."""
        if self._jobs is not None:
            self._jobs.put(None)
            self._jobs = None
        self._started_at = None

    def _thread(self) -> SimpleQueue[Callable[[], None] | None]:
        if self._jobs is None:
            self._jobs = SimpleQueue()
            threading.Thread(target=_serve, args=(self._jobs,), name=self._name, daemon=True).start()
        return self._jobs

    def _run(
        self, work: Callable[[], T], answer: asyncio.Future[T], loop: asyncio.AbstractEventLoop, jobs: Any
    ) -> None:
        try:
            result: Any = work()
            error: Exception | None = None
        except Exception as raised:  # passed on to the caller
            result, error = None, raised
        if not loop.is_closed():
            loop.call_soon_threadsafe(self._settle, answer, result, error, jobs)

    def _settle(self, answer: asyncio.Future[Any], result: Any, error: Exception | None, jobs: object) -> None:
        if jobs is self._jobs:
            self._started_at = None
        if answer.cancelled():
            return
        if error is None:
            answer.set_result(result)
        else:
            answer.set_exception(error)
            answer.exception()  # retrieved here: a caller that gave up does not


def _serve(jobs: SimpleQueue[Callable[[], None] | None]) -> None:
    while (job := jobs.get()) is not None:
        job()
