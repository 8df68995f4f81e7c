"""The thread in which jobs make calls at the same time."""

from __future__ import annotations

import asyncio
import os
import threading
from concurrent.futures import Future, wait
from typing import Any

import pytest

from workers.http.call_loop import CallLoop


async def thread_and_loop() -> tuple[str, int]:
    return threading.current_thread().name, id(asyncio.get_running_loop())


def test_one_loop_serves_all_calls() -> None:
    loop = CallLoop()
    first, second = loop.run(thread_and_loop()), loop.run(thread_and_loop())
    assert first == second
    assert first[0] != threading.current_thread().name


def test_what_a_call_raises_is_raised_here() -> None:
    async def fails() -> None:
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        CallLoop().run(fails())


def test_calls_that_are_started_run_at_the_same_time_and_each_has_its_result() -> None:
    loop, met = CallLoop(), 0

    async def meets() -> int:
        nonlocal met
        met += 1
        while met < 20:
            await asyncio.sleep(0.001)
        return met

    async def fails() -> None:
        raise ValueError("no")

    calls: list[tuple[Any, Future[Any]]] = [(meets, Future()) for _ in range(20)]
    failed: Future[Any] = Future()
    loop.start([*calls, (fails, failed)])
    done, _ = wait([future for _, future in calls], 60)
    assert {each.result() for each in done} == {20}
    assert isinstance(failed.exception(60), ValueError)


def test_a_process_that_was_forked_has_a_loop_of_its_own() -> None:
    """As the pool of a Celery worker. Its parent's goes on."""
    loop = CallLoop()
    name, _ = loop.run(thread_and_loop())
    child = os.fork()
    if child == 0:
        threading.Timer(30.0, os._exit, (2,)).start()
        os._exit(0 if loop.run(thread_and_loop())[0] == name else 1)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0
    assert loop.run(thread_and_loop())[0] == name
