"""Who polls, who reads, and what a silent or dead instance means."""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace
from typing import Any

import pytest

from api.openai.state.fleet import DEAD_AFTER_S, GatewayFleet
from api.openai.state.telemetry import Monitor
from controller.core import events as ev
from controller.core.kv_links import LinkReport, LinkState
from controller.core.types import InstanceSpec, Role
from tests.api.openai.gateways import snapshot
from workers.backends.base import EngineError, Limits
from workers.backends.fake import FakeBackend
from workers.live import LiveUnavailable


class Heard:
    def __init__(self) -> None:
        self.events: list[ev.Event] = []
        self.down: list[str] = []
        self.busy: set[str] = set()

    def push(self, event: ev.Event) -> None:
        self.events.append(event)

    def instance_down(self, instance_id: str, why: str, *, died: bool = False) -> None:
        self.down.append(instance_id)

    def serving(self, instance_id: str) -> int:
        return int(instance_id in self.busy)

    def kinds(self) -> list[str]:
        """Of what was said about instances that are there."""
        kinds = [type(event).__name__ for event in self.events if not isinstance(event, ev.Expected)]
        self.events.clear()
        return kinds


class Board:
    """Redis, as far as telemetry goes."""

    def __init__(self, leader: bool = True) -> None:
        self.leader = leader
        self.away = False
        self.published: dict[str, dict[str, Any]] = {}

    async def lease(self, what: str, ttl_s: float) -> bool:
        if self.away:
            raise LiveUnavailable("away")
        return self.leader

    async def publish_telemetry(self, loads: dict[str, dict[str, Any]], ttl_s: float) -> None:
        self.published |= loads

    async def read_telemetry(self, instance_ids: list[str]) -> dict[str, dict[str, Any]]:
        return {name: load for name, load in self.published.items() if name in instance_ids}


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def build(board: Board | None = None, names: tuple[str, ...] = ("e1",)) -> tuple[GatewayFleet, Monitor, Heard, Clock]:
    clock, heard, session = Clock(), Heard(), None
    fleet = GatewayFleet(session, Limits(), clock)  # type: ignore[arg-type]
    fleet.bind(heard)
    fleet.apply(snapshot(names))
    return fleet, Monitor(fleet, board, clock), heard, clock


def fake(fleet: GatewayFleet, name: str = "e1") -> FakeBackend:
    backend = fleet.backends[name]
    assert isinstance(backend, FakeBackend)
    return backend


async def polled(monitor: Monitor) -> None:
    await monitor.round()
    await monitor.settle(1)


async def test_an_instance_is_up_when_it_answers() -> None:
    fleet, monitor, heard, _ = build()
    assert heard.kinds() == []
    await polled(monitor)
    assert heard.kinds() == ["InstanceUp", "Telemetry"]
    await polled(monitor)
    assert heard.kinds() == ["Telemetry"]
    assert fleet.seats["e1"].up


async def test_an_unreachable_instance_is_down_at_once_and_up_when_it_is_back() -> None:
    fleet, monitor, heard, _ = build()
    await polled(monitor)
    fake(fleet).dead = True
    await polled(monitor)
    assert heard.down == ["e1"]
    await polled(monitor)
    assert heard.down == ["e1"]
    heard.kinds()
    fake(fleet).dead = False
    await polled(monitor)
    assert heard.kinds() == ["InstanceUp", "Telemetry"]


def test_a_slow_instance_is_dead_only_after_long_silence() -> None:
    fleet, _, heard, clock = build()
    fleet.reported("e1", fake(fleet).load._replace(observed_at=clock.now))
    slow = EngineError("did not answer in time")
    clock.now += DEAD_AFTER_S - 1
    fleet.silent("e1", slow)
    assert heard.down == []
    fleet.heard("e1", clock.now)
    clock.now += 2
    fleet.silent("e1", slow)
    assert heard.down == []
    clock.now += DEAD_AFTER_S
    fleet.silent("e1", slow)
    assert heard.down == ["e1"]


async def test_the_leader_publishes_and_a_reader_does_not_poll() -> None:
    board = Board()
    _, leader, _, _ = build(board)
    await polled(leader)
    await polled(leader)
    assert board.published["e1"]["running"] == 0
    board.leader = False
    board.published["e1"]["running"] = 17
    fleet, reader, heard, clock = build(board)
    fake(fleet).dead = True
    await polled(reader)
    telemetry = heard.events[-1]
    assert isinstance(telemetry, ev.Telemetry)
    assert telemetry.load.running == 17
    assert clock.now - 1 < telemetry.load.observed_at <= clock.now
    assert not reader.leading


@pytest.mark.parametrize(
    "other",
    [
        {"observed_at": None},
        {"at": 1.0},
        {"a_new_field": 1},
        {"links": [{"state": "a_new_state"}]},
        {"links": 3},
        "all of it is something else",
    ],
)
async def test_a_message_of_another_version_is_not_read_and_the_engine_is_polled(other: Any) -> None:
    board = Board()
    _, leader, _, _ = build(board, ("e1", "e2"))
    await polled(leader)
    await polled(leader)
    board.leader = False
    old = board.published["e1"]
    board.published["e1"] = other if isinstance(other, str) else old | other
    if other == {"at": 1.0}:
        del board.published["e1"]["observed_at"]
    board.published["e2"]["running"] = 17
    fleet, reader, heard, _ = build(board, ("e1", "e2"))
    await polled(reader)
    loads = {event.instance_id: event.load.running for event in heard.events if isinstance(event, ev.Telemetry)}
    assert loads == {"e1": 0, "e2": 17}
    assert fleet.seats["e1"].up


async def test_a_board_that_answers_nonsense_stops_no_round() -> None:
    class Nonsense(Board):
        async def read_telemetry(self, instance_ids: list[str]) -> dict[str, dict[str, Any]]:
            raise KeyError("instance")

    fleet, reader, _, _ = build(Nonsense(leader=False))
    await polled(reader)
    assert fleet.seats["e1"].up


def link_down(fleet: GatewayFleet) -> None:
    """e1 decodes, and says that its link from p is down."""
    spec = InstanceSpec("e1", "demo", backend="fake", role=Role.DECODE)
    fleet.apply(replace(snapshot(()), instances=(spec,)))
    fake(fleet).link_reports = [LinkReport("p", LinkState.DOWN, last_error="cut")]


def links(heard: Heard) -> list[ev.LinkSeen]:
    return [event for event in heard.events if isinstance(event, ev.LinkSeen)]


async def test_links_come_with_telemetry_and_from_the_leader_as_well() -> None:
    board = Board()
    fleet, leader, heard, _ = build(board)
    link_down(fleet)
    await polled(leader)
    await polled(leader)
    seen = ev.LinkSeen("p", "e1", LinkState.DOWN)
    assert links(heard) == [seen], "told once, for it did not change"
    board.leader = False
    fleet, reader, heard, _ = build(board)
    link_down(fleet)
    fake(fleet).dead = True
    await polled(reader)
    assert links(heard) == [seen]


async def test_an_engine_that_does_not_tell_of_its_links_is_up_all_the_same() -> None:
    fleet, monitor, heard, _ = build()
    link_down(fleet)

    async def deaf() -> list[LinkReport]:
        raise EngineError("unreadable links")

    fake(fleet).links = deaf  # type: ignore[method-assign]
    await polled(monitor)
    assert heard.kinds() == ["InstanceUp", "Telemetry"]


async def test_an_engine_slow_to_tell_of_its_links_has_told_its_load() -> None:
    fleet, monitor, heard, _ = build()
    link_down(fleet)
    answered = asyncio.Event()

    async def slow() -> list[LinkReport]:
        await answered.wait()
        return []

    fake(fleet).links = slow  # type: ignore[method-assign]
    await monitor.round()
    await monitor.settle(0.05)
    assert heard.kinds() == ["InstanceUp", "Telemetry"]
    answered.set()
    await monitor.settle(1)


async def test_collocated_instances_are_not_asked_for_links() -> None:
    fleet, monitor, heard, _ = build()
    fake(fleet).link_reports = [LinkReport("p", LinkState.DOWN)]
    await polled(monitor)
    assert links(heard) == []


async def test_the_leader_forgets_an_instance_that_is_gone() -> None:
    board = Board()
    fleet, leader, _, _ = build(board, ("e1", "e2"))
    await polled(leader)
    fleet.apply(snapshot(("e2",)))
    board.published.clear()
    await polled(leader)
    assert list(board.published) == ["e2"]


async def test_a_reader_polls_itself_what_is_stale_or_missing() -> None:
    board = Board(leader=False)
    fleet, reader, heard, _ = build(board, ("e1", "e2"))
    old = fake(fleet).load._asdict() | {"observed_at": time.time() - 60}
    board.published["e1"] = old
    await polled(reader)
    assert sorted(heard.kinds()) == ["InstanceUp", "InstanceUp", "Telemetry", "Telemetry"]


async def test_with_redis_away_each_polls_for_itself() -> None:
    board = Board(leader=False)
    board.away = True
    _, monitor, heard, _ = build(board)
    await polled(monitor)
    assert heard.kinds() == ["InstanceUp", "Telemetry"]


async def test_configuration_changes_are_told_level_triggered() -> None:
    fleet, monitor, heard, _ = build(names=("e1", "e2"))
    await polled(monitor)
    heard.kinds()
    fleet.apply(snapshot(("e1", "e2"), draining=("e1",)))
    fleet.apply(snapshot(("e1", "e2"), draining=("e1",)))
    assert heard.kinds() == ["InstanceDraining"]
    fleet.apply(snapshot(("e1", "e2")))
    assert heard.kinds() == ["InstanceUp"]


async def test_an_instance_that_leaves_ends_its_requests_first() -> None:
    fleet, monitor, heard, _ = build(names=("e1", "e2"))
    await polled(monitor)
    heard.kinds()
    heard.busy = {"e1"}
    fleet.apply(snapshot(("e2",)))
    assert heard.kinds() == ["InstanceDraining"]
    assert heard.down == []
    heard.busy = set()
    fleet.sweep()
    assert heard.down == ["e1"]
    assert list(fleet.backends) == ["e2"]


async def test_a_new_address_is_a_new_instance() -> None:
    fleet, monitor, heard, _ = build()
    await polled(monitor)
    moved = InstanceSpec("e1", "demo", url="http://127.0.0.1:9", backend="fake")
    fleet.apply(snapshot(instances=()).__class__(version=2, instances=(moved,)))
    assert heard.down == ["e1"]
    assert fleet.seats["e1"].spec.url == "http://127.0.0.1:9"
    assert not fleet.seats["e1"].up
