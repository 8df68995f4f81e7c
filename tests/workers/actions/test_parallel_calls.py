"""Engines asked together: who hangs or fails holds nobody up, and calls have a bound, in threads and in the event
loop."""

from __future__ import annotations

import asyncio
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, wait
from functools import partial
from typing import Any

import pytest

from workers.actions.parallel_calls import FRESH_S, LoopCalls, ThreadCalls

LONG_S = 60.0  # however slow the test's machine: nothing here waits for it


class InLoop(LoopCalls):
    """With calls that block, so that the same tests hold for both."""

    def ask(self, calls: Mapping[Any, Callable[[], Any]], within_s: float) -> dict[Any, Future[Any]]:
        return super().ask({key: partial(asyncio.to_thread, call) for key, call in calls.items()}, within_s)


@pytest.fixture(params=[ThreadCalls, InLoop])
def made(request: pytest.FixtureRequest) -> Any:
    """Makes parallel calls."""
    return request.param


@pytest.fixture
def gate() -> Iterator[threading.Event]:
    """What hangs does so until the test ends, or opens it."""
    event = threading.Event()
    yield event
    event.set()


def test_all_are_heard_with_what_they_say_or_raise(made: Any) -> None:
    def fails() -> str:
        raise ValueError("no")

    heard = made().ask({"a": lambda: "yes", "b": fails}, LONG_S)
    assert heard["a"].result() == "yes"
    assert isinstance(heard["b"].exception(), ValueError)


def test_who_hangs_is_missing_and_not_asked_again_until_it_is_over(made: Any, gate: threading.Event) -> None:
    asked: Counter[str] = Counter()

    def hangs() -> str:
        asked["h"] += 1
        gate.wait()
        return "late"

    parallel = made(patience_s=0.01)
    calls = {"h": hangs, "a": lambda: "yes"}
    assert "h" not in parallel.ask(calls, 1.0)
    began = time.monotonic()
    for _ in range(5):
        assert "h" not in parallel.ask({"h": hangs}, LONG_S), "it was silent: nobody waits for it any more"
    assert (asked["h"], time.monotonic() - began < LONG_S) == (1, True)
    gate.set()
    wait(parallel._open.values(), LONG_S)
    heard = parallel.ask({"h": hangs}, LONG_S)
    assert (heard["h"].result(), asked["h"]) == ("late", 1)


def test_an_answer_to_an_old_question_is_not_told_but_asked_again(made: Any, gate: threading.Event) -> None:
    """Its process may have done something else for minutes in between."""
    said = iter(("old", "new"))

    def slow() -> str:
        word = next(said)
        if word == "old":
            gate.wait()
        return word

    parallel = made(patience_s=0.01)
    assert parallel.ask({"h": slow}, 0.01) == {}
    parallel._begun["h"] -= 2 * FRESH_S  # long ago
    gate.set()
    wait(parallel._open.values(), LONG_S)
    while not (heard := parallel.ask({"h": slow}, LONG_S)):
        wait(parallel._open.values(), LONG_S)
    assert heard["h"].result() == "new"


def test_calls_have_a_bound_and_who_answers_comes_before_who_hangs(made: Any, gate: threading.Event) -> None:
    running, lock = Counter[str](), threading.Lock()

    def hangs() -> None:
        with lock:
            running["now"] += 1
            running["most"] = max(running["most"], running["now"])
        gate.wait()

    parallel = made(at_once=8, patience_s=0.01)
    healthy = {f"h{n}": lambda: "yes" for n in range(40)}
    assert parallel.ask(healthy, LONG_S).keys() == healthy.keys()
    silent = {f"s{n}": hangs for n in range(100)}
    for _ in range(50):
        heard = parallel.ask({**silent, **healthy}, 0.5)
        assert running["most"] <= 16
        if healthy.keys() <= heard.keys():
            break
    assert healthy.keys() <= heard.keys()
    assert sum(parallel.silent(key) for key in silent) >= 8
    assert not any(parallel.silent(key) for key in healthy)


def test_the_silent_take_turns(made: Any, gate: threading.Event) -> None:
    asked: Counter[int] = Counter()

    def away(number: int) -> None:
        asked[number] += 1
        raise OSError

    parallel = made(at_once=4, patience_s=LONG_S)
    calls = {number: (lambda number=number: away(number)) for number in range(20)}
    for _ in range(3):
        assert parallel.ask(calls, LONG_S).keys() == calls.keys()
    assert set(asked.values()) == {3}


def test_what_no_one_asks_for_any_more_is_forgotten(made: Any, gate: threading.Event) -> None:
    parallel = made(patience_s=0.0)
    parallel.ask({"h": gate.wait}, 0.05)
    gate.set()
    wait(parallel._open.values(), LONG_S)
    assert parallel.ask({}, LONG_S) == {}
    assert (parallel._open, parallel._silent) == ({}, {})


async def on_loop() -> asyncio.AbstractEventLoop:
    return asyncio.get_running_loop()


def test_calls_in_the_loop_share_one_thread_and_go_on_in_it() -> None:
    parallel = LoopCalls()
    loops = {future.result() for future in parallel.ask(dict.fromkeys(range(200), on_loop), LONG_S).values()}
    loops |= {future.result() for future in LoopCalls().ask({"a": on_loop}, LONG_S).values()}
    assert len(loops) == 1
