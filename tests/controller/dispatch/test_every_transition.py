"""Random runs of a scheduler whose driver reports anything that engines may do: they take every row of the table."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence

import pytest

from controller.core import events as ev
from controller.core.types import InstanceSpec, Role
from controller.dispatch import build_scheduler
from controller.dispatch.lifecycle import (
    LANDED,
    MAX_PREFILLS,
    STEPS,
    TWO_STAGES,
    UNDER_WAY,
    Followed,
    On,
    OpenRequest,
    State,
    Transition,
)
from tests.controller.dispatch.disaggregation.decoders import STEP, of
from tests.controller.dispatch.fleet import request

FLEET = {
    "p": Role.PREFILL,
    "q": Role.PREFILL,
    "s": Role.PREFILL,
    "d": Role.DECODE,
    "e": Role.DECODE,
    "c": Role.COLLOCATED,
}
TIMES = {
    "prefilling_timeout_s": 3.0,
    "waiting_timeout_s": 4.0,
    "placed_timeout_s": 1.0,
    "reserved_timeout_s": 3.0,
    "moving_timeout_s": 1.5,
    "max_failures": 2,
}
ENDS = (ev.EngineFailed, ev.TransferFailed, ev.AnsweredWhole, ev.Finished)  # rarer, or no request would get far
RUNS = 60
EVENTS = 300


class RandomDriver:
    """Knows each request by the scheduler's own state, and reports what could happen in that state next."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.now = 0.0
        self.asked = 0
        self.names: list[str] = []
        self.last = ""
        self.defects: list[tuple[str, str]] = []
        self.breaks = False  # the next pass with an arrival fails
        placement = {"migration": {"name": "one_shot"}} if seed % 4 == 3 else {}
        self.scheduler = build_scheduler("slackline", {"migrator": TIMES, **placement}, self.defect)
        self.handle = self.scheduler.dispatcher.handle
        self.scheduler.dispatcher.handle = self.dispatch  # type: ignore[method-assign]
        self.scheduler.handle([self.up(name) for name in FLEET], 0.0)

    def up(self, name: str) -> ev.InstanceUp:
        spec = InstanceSpec(name, "m", latency=STEP, max_num_seqs=3, role=FLEET[name])
        return ev.InstanceUp(spec, paired=name == "s")

    def defect(self, who: str, events: Sequence[ev.Event], error: Exception) -> None:
        self.defects.append((who, str(error)))

    def dispatch(self, events: Sequence[ev.Event], now: float) -> ev.Reply:
        if self.breaks and any(isinstance(event, ev.Arrived) for event in events):
            self.breaks = False
            raise RuntimeError("on purpose")
        return self.handle(events, now)

    def step(self) -> None:
        rng = self.rng
        self.now += rng.choice((0.0, 0.01, 0.05, 0.1, 0.5))
        self.breaks = self.breaks or rng.random() < 0.01
        batch = self.happens()
        if rng.random() < 0.3:
            batch += self.happens(besides=self.last)
        self.scheduler.handle(batch, self.now)
        self.names = [name for name in self.names if self.scheduler.state_of(name) is not State.ENDED]
        self.agree()

    def agree(self) -> None:
        """The migrator has a transfer of exactly the requests with two stages, in the request's own state."""
        migrator = self.scheduler.migrator
        assert migrator is not None
        states = {name: found.state for name, found in self.scheduler._open.items() if found.state in TWO_STAGES}
        assert {transfer.request.id: transfer.state for transfer in migrator._queue} == states

    def all_end(self) -> None:
        """Every client hangs up, and every engine frees what it kept."""
        for name in self.names:
            self.scheduler.handle([ev.Cancelled(name)], self.now)
        self.now += 100.0
        self.scheduler.handle([], self.now)

    def happens(self, besides: str = "") -> list[ev.Event]:
        """Something happens, but not to that request: what an engine says of one comes in an order of its own."""
        rng = self.rng
        self.last = ""
        if len(self.names) < 8 and rng.random() < 0.5:
            self.asked += 1
            self.names.append(f"r{self.asked}")
            waits = rng.choice((0.2, 60.0))
            asked = request(self.names[-1], self.now, ttft=rng.choice((0.3, 60.0)), wait=waits, output=30)
            asked.attempts = rng.choice((0, 0, MAX_PREFILLS - 1))
            return [ev.Arrived(asked)]
        if rng.random() < 0.05:
            name = rng.choice(list(FLEET))
            return [rng.choice((ev.InstanceDown(name), ev.InstanceDraining(name), self.up(name), self.up(name)))]
        names = [name for name in self.names if name != besides and name in self.scheduler._open]
        if not names:
            return [ev.Woke()]
        self.last = rng.choice(names)
        found = self.scheduler._open[self.last]
        if rng.random() < 0.03:
            return self.at_once(self.last, found)
        events = list(self.possible(self.last, found))
        weights = [1 if isinstance(event, ENDS) else 4 for event in events]
        return rng.choices(events, weights)

    def at_once(self, name: str, found: OpenRequest) -> list[ev.Event]:
        """Its client hangs up, or the end of its answer comes with news that roll it back."""
        if found.state not in (*UNDER_WAY, State.COMMITTED) or found.landed:
            return [ev.Cancelled(name)]
        first = self.rng.choice((ev.InstanceDown(found.target), ev.EngineFailed(name, found.source)))
        return [first, ev.Finished(name, 30)]

    def possible(self, name: str, found: OpenRequest) -> Iterator[ev.Event]:
        state, source, target = found.state, found.source, found.target
        if state in (State.QUEUED, State.WAITING):
            yield ev.Woke()
        if state in (State.SENT, State.ANSWERING, *LANDED):
            yield from (ev.FirstToken(name), ev.FirstToken(name, assumed=True), ev.Finished(name, 30))
            yield ev.EngineFailed(name, target or source, at_fault="answer")
        if state is not State.QUEUED:
            fault = self.rng.choice(("engine", "instance", "request", "kv"))
            yield from (ev.EngineFailed(name, instance, at_fault=fault) for instance in (source, target) if instance)
        if state in LANDED:
            yield ev.KvReleased(name, source)
        if found.answering:
            return
        if state in TWO_STAGES:
            yield ev.PrefillEnding(name, source)
            yield ev.PrefillDone(found.request, source, 100)
            yield ev.AnsweredWhole(name, source)
        if target:
            yield ev.TransferFailed(name, target, self.rng.choice(("no_room", "kv_lost", "refused", "cut")))
        if state in UNDER_WAY:
            yield ev.TransferStarted(name, target, moves=self.rng.random() < 0.1)
            yield ev.TransferMoves(name, target)
            yield ev.TransferDone(name, target, assumed=True)
            yield ev.TransferDone(name, target)
            yield ev.Finished(name, 30)


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> set[Transition]:
    """The transitions that the schedulers and the migrators of a test take."""
    seen: set[Transition] = set()
    follow = Followed.follow

    def followed(self: Followed, on: str) -> bool:
        before = self.state
        done = follow(self, on)
        if done:
            seen.add(Transition(before, on, self.state))
        return done

    monkeypatch.setattr(Followed, "follow", followed)
    return seen


def test_every_row_of_the_table_is_taken_and_nothing_ends_otherwise(taken: set[Transition]) -> None:
    for seed in range(RUNS):
        driver = RandomDriver(seed)
        for _ in range(EVENTS):
            driver.step()
        driver.all_end()
        assert {defect for defect in driver.defects if defect[1] != "on purpose"} == set()
        assert (len(driver.scheduler.queue()), driver.scheduler._open) == (0, {})
        assert all(each.waiting == each.running == 0 for each in driver.scheduler.fleet(driver.now))
    turned_away_by_the_only_choice_which_then_goes_down()
    rows = [step for step in STEPS if step.on != On.ENDS_ENGINES]  # engines do not die here: test_suspects.py
    assert [f"{step.state} {step.on}" for step in rows if step not in taken] == []
    assert taken <= set(STEPS)


def turned_away_by_the_only_choice_which_then_goes_down() -> None:
    """What random runs hardly ever meet: it waits, although its decode instance is known."""
    made = build_scheduler("slackline", {"migration": {"name": "one_shot"}})
    asked = request("a", ttft=60.0)
    up = [ev.InstanceUp(InstanceSpec(name, "m", latency=STEP, role=FLEET[name])) for name in "pde"]
    made.handle([*up, ev.Arrived(asked)], 0.0)
    (place,) = of(made.handle([ev.PrefillDone(asked, "p", 100)], 0.1), ev.Place)
    made.handle([ev.TransferFailed("a", place.target, "no_room")], 0.2)
    made.handle([ev.InstanceDown(place.target)], 0.21)
    assert [each.target for each in of(made.handle([], 0.5), ev.Place)] != [place.target]
