"""A request that ends engines: it is found, it fails after two, and the innocent beside it are served."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable

import pytest

from controller.core import events as ev
from controller.core.errors import ConfigError
from controller.core.types import InstanceSpec, LatencyCoefficients, Load, Request, Role, Targets
from controller.dispatch import build_scheduler
from controller.dispatch.suspects import HOLD_S, Present, Suspects

FAST = LatencyCoefficients(0.01, 1e-5, 0.0, 0.01, 0.0, 0.0)
SLOW = LatencyCoefficients(0.02, 3e-5, 0.0, 0.03, 0.0, 0.0)
PREFILL_S = 0.05


def request(name: str, at: float = 0.0, **fields: object) -> Request:
    targets = Targets(30.0, 1.0, None, 120.0)
    return Request(name, at, targets, 100, 10, "demo", "acme", "chat", **fields)  # type: ignore[arg-type]


class Engines:
    """Engines behind a scheduler: each prefills one after the other in `PREFILL_S`, and dies when `deadly` comes up.

    `dies_with`: how the gateway hears of a death."""

    def __init__(self, count: int, deadly: Iterable[str] = (), *, announced: bool = False, **settings: object) -> None:
        self.scheduler = build_scheduler("slackline", {"dispatch": settings} if settings else {})
        self.deadly = set(deadly)
        self.announced = announced  # its calls fail with an error before it goes down
        self.at: dict[str, list[Request]] = {f"e{n}": [] for n in range(count)}
        self.died: list[str] = []
        self.refused: dict[str, ev.Refuse] = {}
        self.served: set[str] = set()
        self.together: list[set[str]] = []
        self.refusing: list[ev.Event] = []
        self.now = 0.0
        for n, name in enumerate(self.at):
            spec = InstanceSpec(name, "demo", max_num_seqs=64, latency=FAST if n % 2 else SLOW)
            self.tell(ev.InstanceUp(spec))

    def tell(self, *events: ev.Event) -> None:
        reply = self.scheduler.handle(events, self.now)
        for action in reply.actions:
            if isinstance(action, ev.Send) and action.instance_id in self.at:
                self.at[action.instance_id].append(action.request)
            elif isinstance(action, ev.Send):  # it is dead, which is no news yet
                name, where = action.request.id, action.instance_id
                self.refusing.append(ev.EngineFailed(name, where, "connection refused", connection="refused"))
            elif isinstance(action, ev.Refuse):
                self.refused[action.request.id] = action
                for there in self.at.values():
                    there[:] = [each for each in there if each.id != action.request.id]

    def step(self) -> None:
        """The next request in turn at each engine gets its first token, or ends its engine."""
        self.now += PREFILL_S
        refusing, self.refusing = self.refusing, []
        self.tell(ev.Woke(), *refusing)
        for name, there in list(self.at.items()):
            if any(each.ended for each in there):
                self.together.append({each.id for each in there})
            if not there:
                continue
            if there[0].id in self.deadly:
                self._die(name)
                continue
            first = there.pop(0)
            self.served.add(first.id)
            self.tell(ev.FirstToken(first.id), ev.Finished(first.id, 10))

    def _die(self, name: str) -> None:
        there = self.at.pop(name)
        self.died.append(name)
        failed = [
            ev.EngineFailed(each.id, name, "cannot be reached", connection="kept" if self.announced else "lost")
            for each in there
        ]
        for each in failed:
            self.tell(each)  # one by one, as connections break
        self.now += 0.01
        self.tell(ev.InstanceDown(name, died=True))

    def run(self, until: Callable[[], bool], steps: int = 400) -> None:
        for _ in range(steps):
            if until():
                return
            self.step()


def test_a_deadly_request_ends_two_engines_and_no_third() -> None:
    engines = Engines(5, {"bad"})
    engines.tell(ev.Arrived(request("bad")))
    engines.run(lambda: bool(engines.refused))
    assert len(engines.died) == 2
    refusal = engines.refused["bad"]
    assert (refusal.code, refusal.decision.reason) == ("ends_engines", "ended_engines")
    assert refusal.decision.figures["died"] == ", ".join(engines.died)
    assert refusal.decision.figures["attempts"] == 2


@pytest.mark.parametrize("deadly", ["r00", "r07", "r23"])
@pytest.mark.parametrize("count", [3, 5])
def test_the_innocent_beside_it_are_served(deadly: str, count: int) -> None:
    engines = Engines(count, {deadly})
    names = [f"r{n:02}" for n in range(24)]
    engines.tell(*(ev.Arrived(request(name)) for name in names))
    engines.run(lambda: len(engines.served) + len(engines.refused) == len(names))
    assert engines.refused.keys() == {deadly}
    assert engines.served == set(names) - {deadly}
    assert len(engines.died) == 2
    assert max(map(len, engines.together)) == 1, "suspects are computed alone"


def test_two_deadly_requests_end_two_engines_each() -> None:
    engines = Engines(6, {"r03", "r11"})
    names = [f"r{n:02}" for n in range(16)]
    engines.tell(*(ev.Arrived(request(name)) for name in names))
    engines.run(lambda: len(engines.served) + len(engines.refused) == len(names))
    assert engines.refused.keys() == {"r03", "r11"}
    assert {each.decision.reason for each in engines.refused.values()} == {"ended_engines"}
    assert len(engines.died) <= 4


def test_requests_behind_many_held_suspects_are_not_held() -> None:
    engines = Engines(3, scan_limit=4)
    engines.tell(*(ev.Arrived(request(f"r{n:02}", ended=("gone",))) for n in range(12)))
    while there := [(name, each) for name, waiting in engines.at.items() for each in waiting]:
        for name, each in there:
            engines.at[name].remove(each)
            engines.tell(ev.EngineFailed(each.id, name, "500"))
    assert len(engines.scheduler.queue()) == 12, "all wait to see whether an engine died"
    engines.tell(ev.Arrived(request("later", engines.now)))
    assert [each.id for waiting in engines.at.values() for each in waiting] == ["later"]


@pytest.mark.parametrize("most", [1, 3])
def test_how_many_engines_is_a_setting(most: int) -> None:
    engines = Engines(6, {"bad"}, most_engines_ended=most, max_attempts=6)
    engines.tell(ev.Arrived(request("bad")))
    engines.run(lambda: bool(engines.refused))
    assert len(engines.died) == most
    with pytest.raises(ConfigError, match="most_engines_ended"):
        build_scheduler("slackline", {"dispatch": {"most_engines_ended": 0}})
    with pytest.raises(ConfigError, match="quarantine_s"):
        build_scheduler("slackline", {"dispatch": {"quarantine_s": -1.0}})


def test_an_engine_that_answers_with_an_error_before_it_dies_counts() -> None:
    engines = Engines(5, {"r02"}, announced=True)
    names = [f"r{n:02}" for n in range(10)]
    engines.tell(*(ev.Arrived(request(name)) for name in names))
    engines.run(lambda: len(engines.served) + len(engines.refused) == len(names))
    assert engines.refused.keys() == {"r02"}
    assert engines.refused["r02"].decision.reason == "ended_engines"
    assert len(engines.died) == 2


def test_a_suspect_waits_until_it_is_known_whether_its_engine_died() -> None:
    engines = Engines(3)
    engines.tell(ev.Arrived(request("a", ended=("gone",))))
    (name,) = [name for name, there in engines.at.items() if there]
    engines.now = 1.0
    engines.at[name].clear()
    engines.tell(ev.EngineFailed("a", name, "500"))
    engines.now += HOLD_S - 0.1
    engines.tell(ev.Woke())
    assert not any(engines.at.values())
    engines.now += 0.2
    engines.tell(ev.Woke())
    assert any(engines.at.values())


def test_a_connection_that_broke_at_an_engine_that_lives_is_forgotten() -> None:
    engines = Engines(4)
    bad = request("a")
    engines.tell(ev.Arrived(bad))
    for _ in range(2):
        (name,) = [name for name, there in engines.at.items() if there]
        engines.at[name].clear()
        engines.tell(ev.EngineFailed("a", name, "connection reset", connection="lost"))
        assert bad.ended == (name,)
        engines.now += 1.0
        engines.tell(ev.Telemetry(name, Load(observed_at=engines.now)))
        assert bad.ended == ()
    assert not engines.refused


@pytest.mark.parametrize(
    "events",
    [
        [ev.InstanceDown("{}"), ev.EngineFailed("a", "{}", "left", at_fault="instance")],
        [
            ev.InstanceDraining("{}"),
            ev.EngineFailed("a", "{}", "reset", connection="lost"),
            ev.InstanceDown("{}", True),
        ],
        [ev.EngineFailed("a", "{}", "no answer in time")],
    ],
    ids=["it left the configuration", "somebody stopped it", "it was slow"],
)
def test_what_is_no_death_makes_no_suspect(events: list[ev.Event]) -> None:
    engines = Engines(2)
    innocent = request("a")
    engines.tell(ev.Arrived(innocent))
    (name,) = [name for name, there in engines.at.items() if there]
    named = [event._replace(instance_id=name) for event in events]  # type: ignore[call-arg]
    for each in named:
        engines.tell(each)
    assert innocent.ended == ()


def test_a_request_with_a_token_at_its_client_is_no_suspect() -> None:
    engines = Engines(2)
    answering = request("a")
    engines.tell(ev.Arrived(answering))
    (name,) = [name for name, there in engines.at.items() if there]
    engines.tell(ev.FirstToken("a"))
    engines.tell(ev.EngineFailed("a", name, "reset", connection="lost"), ev.InstanceDown(name, died=True))
    assert answering.ended == ()


def test_of_requests_that_died_together_nobody_is_accused() -> None:
    """They may all be innocent: a power cut ends every engine of a host."""
    suspects = Suspects()
    a, b = request("a", ended=("e0",)), request("b", ended=("e0",))
    present = [Present(each, True) for each in (a, b)]
    assert [suspects.lost(each, "e1", lambda: present, 1.0) for each in (a, b)] == [False, False]
    assert a.ended == b.ended == ("e0", "e1")


def test_one_past_its_expected_first_token_is_not_taken_for_the_one_computed() -> None:
    suspects = Suspects()
    late, computed = request("late", ended=("e0",)), request("computed", ended=("e9",))
    present = [Present(late, False), Present(computed, True)]
    assert [suspects.lost(each, "e1", lambda: present, 1.0) for each in (late, computed)] == [False, True]


def test_under_load_an_instance_is_kept_free_for_a_suspect() -> None:
    """Otherwise requests that keep coming would hold it off until its waiting time is over."""
    engines = Engines(2, {"bad"})
    engines.tell(*(ev.Arrived(request(name)) for name in ("a", "bad", "b")))
    engines.run(lambda: bool(engines.died))
    serial = itertools.count()
    for _ in range(60):
        engines.tell(*(ev.Arrived(request(f"more-{next(serial)}", engines.now)) for _ in range(2)))
        engines.step()
        if len(engines.died) == 2:
            break
    assert len(engines.died) == 2
    assert engines.refused["bad"].decision.reason == "ended_engines"


def test_the_same_request_is_refused_for_a_while_and_others_are_not() -> None:
    engines = Engines(4, {"bad"}, quarantine_s=60.0)
    engines.tell(ev.Arrived(request("bad", fingerprint="f")))
    engines.run(lambda: bool(engines.refused))
    assert engines.refused["bad"].decision.figures["quarantine_s"] == 60.0
    sent = itertools.count()
    for fingerprint in ("f", "g", ""):
        engines.tell(ev.Arrived(request(f"again-{next(sent)}", engines.now, fingerprint=fingerprint)))
    assert engines.refused["again-0"].decision.reason == "quarantined"
    assert engines.refused["again-0"].retry_after_s == pytest.approx(60.0, abs=1.0)
    assert not {"again-1", "again-2"} & engines.refused.keys()
    engines.now += 61.0
    engines.tell(ev.Arrived(request("later", engines.now, fingerprint="f")))
    assert "later" not in engines.refused
    assert not engines.scheduler.suspects.quarantine


def test_without_quarantine_it_may_come_again() -> None:
    engines = Engines(4, {"bad"}, quarantine_s=0.0)
    engines.tell(ev.Arrived(request("bad", fingerprint="f")))
    engines.run(lambda: bool(engines.refused))
    assert "quarantine_s" not in engines.refused["bad"].decision.figures
    assert not engines.scheduler.suspects.quarantine


def test_a_decode_engine_that_dies_counts_like_any_other() -> None:
    scheduler = build_scheduler("slackline", {})
    for name, role in (("p", Role.PREFILL), ("d0", Role.DECODE), ("d1", Role.DECODE), ("d2", Role.DECODE)):
        scheduler.handle([ev.InstanceUp(InstanceSpec(name, "demo", role=role, max_num_seqs=8, latency=FAST))], 0.0)
    bad, now, dead, refused = request("bad"), 0.0, [], []
    actions = list(scheduler.handle([ev.Arrived(bad)], now).actions)
    for _ in range(60):
        now += 0.1
        events: list[ev.Event] = [ev.Woke()]
        for action in actions:
            if isinstance(action, ev.Send):
                events = [ev.PrefillDone(bad, action.instance_id, 100)]
            elif isinstance(action, ev.Place):
                dead.append(action.target)
                events = [
                    ev.TransferStarted("bad", action.target),
                    ev.EngineFailed("bad", action.target, "reset", connection="lost"),
                    ev.InstanceDown(action.target, died=True),
                ]
            elif isinstance(action, ev.Refuse):
                refused.append(action)
        actions = list(scheduler.handle(events, now).actions)
    assert len(dead) == 2
    assert [each.decision.reason for each in refused] == ["ended_engines"]
