"""How long a test may take, and what it says when it takes longer.

pytest-timeout starts a timer for each test. The limit is that of the test's own mark `timeout`, else that of its kind
(`LIMITS_S`), else `timeout` in pyproject.toml. It counts what is started for the test, also what others share. It is
for tests that would never end, so it is far above what one takes on a busy machine.

At the limit pytest-timeout's own handler raises an error wherever the main thread is. This one looks for a better
place, so that the test fails, its fixtures stop what they started, and later tests find what they share:

- asyncio gives an error that is raised within a task to that task, which need not be the test's, and drops one of other
  callbacks. Raised while the loop waits, it ends the test.
- So it is with Playwright's loop, which runs in a greenlet of its own: it hands on what is raised while it waits.
- The test's frames are not on the stack while its loop waits. The stacks of tasks and of other threads are printed.
- What ends the test may hang too. The teardown has the same limit, and an error that was swallowed is raised again.
"""

from __future__ import annotations

import asyncio
import inspect
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Generator, Sequence
from types import FrameType
from typing import Any

import pytest

# Of the tests that have one of these marks, in seconds; the longest, if they have several.
LIMITS_S = {
    "slow": 300.0,
    "torch": 300.0,
    "browser": 300.0,  # the first one starts a whole system and signs in its people
    "ray": 400.0,  # the first one starts a cluster and a system
    "vllm": 400.0,  # servers have START_TIMEOUT_S to start
    "gpu": 900.0,
    "simulated": 1500.0,  # at the lowest priority, beside tests that use all cores
    "fuzz": 1500.0,
}
AGAIN_S = 60.0  # until an error that was swallowed is raised again; a test may stop a system in that time
IN_A_CALLBACK_S, IN_A_CALLBACK_MOST = 0.004, 500  # how often, and how many times, a callback that runs is left alone
MOST_TASKS = 20
START: pytest.StashKey[Callable[[], None]] = pytest.StashKey()


def set_limits(items: Sequence[pytest.Item]) -> None:
    """Mark tests with the limit of their kind."""
    for item in items:
        of_kinds = [limit_s for kind, limit_s in LIMITS_S.items() if item.get_closest_marker(kind)]
        if of_kinds and item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(max(of_kinds)))


class Alarm:
    """SIGALRM for one test."""

    def __init__(self, limit_s: float) -> None:
        self.limit_s = limit_s
        self._left_alone = 0
        self._told = False

    def start(self) -> None:
        signal.signal(signal.SIGALRM, self._rings)
        signal.setitimer(signal.ITIMER_REAL, self.limit_s, AGAIN_S)

    def stop(self) -> None:
        signal.setitimer(signal.ITIMER_REAL, 0)

    def _rings(self, number: int, frame: FrameType | None) -> None:
        __tracebackhide__ = True
        loop = running_loop()
        if not self._told:
            self._told = True
            print_stacks(loop)
        if loop and within_a_callback(frame) and self._left_alone < IN_A_CALLBACK_MOST:
            self._left_alone += 1
            signal.setitimer(signal.ITIMER_REAL, IN_A_CALLBACK_S, AGAIN_S)
            return
        raise pytest.fail.Exception(f"It took longer than its limit of {self.limit_s:g} s (tests/limits.py).")


def running_loop() -> asyncio.AbstractEventLoop | None:
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None


def within_a_callback(frame: FrameType | None) -> bool:
    """Of the event loop: a step of a task, or something else that it was asked to call."""
    while frame is not None and frame.f_code is not asyncio.Handle._run.__code__:
        frame = frame.f_back
    return frame is not None


def print_stacks(loop: asyncio.AbstractEventLoop | None) -> None:
    """Of the tasks of this loop and of all other threads. Pytest prints them with the failure."""
    tasks = sorted(asyncio.all_tasks(loop), key=lambda task: (len(task.get_name()), task.get_name())) if loop else []
    for task in tasks[:MOST_TASKS]:
        print(f"-- {task.get_name()} of {len(tasks)} tasks", *awaited(task), sep="\n   ", file=sys.stderr)
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    for ident, frame in sys._current_frames().items():
        if ident != threading.get_ident():
            stack = "".join(traceback.format_stack(frame))
            print(f"-- thread {names.get(ident, ident)}\n{stack}", end="", file=sys.stderr)


def awaited(task: asyncio.Task[object]) -> list[str]:
    """Where a task is, from its coroutine to the innermost that it awaits. (`Task.get_stack` has the first alone.)"""
    found, at = [], task.get_coro()
    while inspect.iscoroutine(at) and at.cr_frame is not None:
        found.append(f"{at.cr_code.co_filename}:{at.cr_frame.f_lineno} in {at.cr_code.co_qualname}")
        at = at.cr_await
    return found


@pytest.hookimpl(optionalhook=True)
def pytest_timeout_set_timer(item: pytest.Item, settings: Any) -> bool | None:
    """As pytest-timeout does, which stops the timer by this attribute. None: it does so itself."""
    if settings.method != "signal" or threading.current_thread() is not threading.main_thread():
        return None
    alarm = Alarm(settings.timeout)
    item.cancel_timeout = alarm.stop  # type: ignore[attr-defined]
    item.stash[START] = alarm.start
    alarm.start()
    return True


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_teardown(item: pytest.Item) -> Generator[None, object, object]:
    """pytest-timeout stops its timer when a test has failed."""
    if (start := item.stash.get(START, None)) and not item.config.getoption("usepdb"):
        start()
    return (yield)
