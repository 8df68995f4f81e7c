"""With eight models a pass costs as much as what it looks at, and not as much as what waits."""

from __future__ import annotations

import statistics
import sys
from types import FrameType

import pytest

from benchmarks.bench_dispatch import MODELS, MigratorBench
from controller.core import events as ev
from controller.dispatch.disaggregation.reach import Reach


class Calls:
    """Counts calls of Python and C functions: the cost of a pass, whatever else runs on the machine."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self, frame: FrameType, event: str, arg: object) -> None:
        self.count += event in ("call", "c_call")


def calls_of_passes(waiting: int, passes: int = 60) -> float:
    """Of the median pass."""
    bench = MigratorBench("slackline", waiting, seed=1)
    found = []
    for _ in range(passes):
        calls = Calls()
        sys.setprofile(calls)
        try:
            bench.one_pass()
        finally:
            sys.setprofile(None)
        found.append(calls.count)
    return statistics.median(found)


def test_a_pass_costs_no_more_when_ten_times_as_many_wait() -> None:
    assert calls_of_passes(1_000) < 1.5 * calls_of_passes(100)


def test_only_the_model_for_which_something_happened_is_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = MigratorBench("slackline", 30 * MODELS, seed=1)
    while bench.landing:
        bench.step(bench.landed())
    looked_at = []
    decoders = Reach.decoders
    monkeypatch.setattr(
        Reach, "decoders", lambda self, t, now: looked_at.append(t.request.model) or decoders(self, t, now)
    )
    bench.step([ev.Finished(bench.decoding["m3"].pop(), 20)])
    assert set(looked_at) == {"m3"}
    assert bench.placed > 0
