"""With eight models a pass costs as much as what it looks at, and not as much as what waits."""

from __future__ import annotations

import random
import statistics
import sys
from collections.abc import Iterable
from types import FrameType

import pytest

from benchmarks.bench_dispatch import LATENCY, MODELS, MigratorBench, make_request
from controller.core import events as ev
from controller.core.types import InstanceSpec, Role
from controller.dispatch import build_migrator
from controller.dispatch.disaggregation.reach import Reach

NOW = 1_000.0
SLOTS = 4


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


class FullMigrator:
    """Eight models, each with two decode instances that are full and a part of the stages that wait. `looked_at`: the
    models of the stages that the last pass looked at."""

    def __init__(self, waiting: int, monkeypatch: pytest.MonkeyPatch) -> None:
        self.looked_at: list[str] = []
        self.now = NOW
        self.migrator = build_migrator("slackline")
        self.decoding: dict[str, list[str]] = {f"m{i}": [] for i in range(MODELS)}
        decoders = Reach.decoders
        monkeypatch.setattr(
            Reach, "decoders", lambda reach, t, now: self.looked_at.append(t.request.model) or decoders(reach, t, now)
        )
        roles = {"p": Role.PREFILL, "d0": Role.DECODE, "d1": Role.DECODE}
        self.pass_of(
            ev.InstanceUp(InstanceSpec(f"{model}-{name}", model, latency=LATENCY, max_num_seqs=SLOTS, role=role))
            for model in self.decoding
            for name, role in roles.items()
        )
        rng = random.Random(1)
        requests = [make_request(rng, n, NOW, f"m{n % MODELS}") for n in range(waiting + 2 * SLOTS * MODELS)]
        self.pass_of(ev.PrefillDone(each, f"{each.model}-p", each.prompt_tokens) for each in requests)
        assert self.migrator.waiting() == waiting

    def pass_of(self, events: Iterable[ev.Event]) -> int:
        """How many stages it placed; their KV arrives in passes of their own."""
        self.now += 1e-6
        self.looked_at.clear()
        placed = [
            action for action in self.migrator.handle(list(events), self.now).actions if isinstance(action, ev.Place)
        ]
        looked_at = list(self.looked_at)
        for each in placed:
            name = each.request.id
            self.decoding[each.request.model].append(name)
            landed = ev.TransferDone(name, each.target, released=True)
            self.migrator.handle([ev.TransferStarted(name, each.target), landed, ev.FirstToken(name)], self.now)
        self.looked_at = looked_at
        return len(placed)


def test_of_10_000_stages_a_pass_looks_at_a_few_of_one_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """An answer ends, so one stage of its model finds a slot: behind it as many are looked at as a pass may that finds
    no room for them, and none of the other seven models."""
    full = FullMigrator(10_000, monkeypatch)
    for number in range(10 * MODELS):
        model = f"m{number % MODELS}"
        assert full.pass_of([ev.Finished(full.decoding[model].pop(0), 20)]) == 1
        assert set(full.looked_at) == {model}
        assert len(full.looked_at) <= 1 + 2 * full.migrator.config.scan_limit
