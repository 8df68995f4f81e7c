"""Instances on their way: what the dispatcher is told of them, and requests that wait for one in a whole gateway."""

from __future__ import annotations

import asyncio
import math
import time
from dataclasses import replace
from typing import Any

import pytest

from api.openai.state.fleet import DEAD_AFTER_S, REPLACED_WITHIN_S, GatewayFleet
from api.openai.status import fleet_message, health
from controller.core import events as ev
from controller.core.snapshot import ComingConfig, GatewaySnapshot, ModelConfig, snapshot_from_json
from controller.core.types import InstanceSpec, Load, Outcome, Role
from tests.api.openai.gateways import TestBed, completion, snapshot
from tests.api.openai.state.test_telemetry import Clock, Heard
from tests.waiting import until_on_loop
from workers.backends.base import EngineError, Limits
from workers.backends.fake import Script

GONE = EngineError("connection refused", unreachable=True)


def spec(name: str = "e1", provisioner: str = "process", **more: Any) -> InstanceSpec:
    return InstanceSpec(name, "demo", backend="fake", labels={"provisioner": provisioner}, **more)


def with_instances(*specs: InstanceSpec, **more: Any) -> GatewaySnapshot:
    return replace(snapshot(()), **{"version": 2, "instances": specs, **more})


class Told(Heard):
    """The newest word on each model, seconds from now; absent: none is on its way."""

    def coming(self, clock: Clock) -> dict[str, float]:
        at = {event.model: event.at for event in self.events if isinstance(event, ev.Expected)}
        return {model: when - clock.now for model, when in at.items() if not math.isinf(when)}


def build(config: GatewaySnapshot) -> tuple[GatewayFleet, Told, Clock]:
    session: Any = None
    clock, told = Clock(), Told()
    fleet = GatewayFleet(session, Limits(), clock)
    fleet.bind(told)
    fleet.apply(config)
    return fleet, told, clock


def answers(fleet: GatewayFleet, clock: Clock, name: str = "e1") -> None:
    fleet.reported(name, Load(clock.now))


def test_what_the_configuration_says_is_starting_is_on_its_way() -> None:
    later = time.time() + 30
    coming = (ComingConfig("a", "demo", later), ComingConfig("b", "demo", later + 30), ComingConfig("c", "other"))
    fleet, told, clock = build(with_instances(coming=coming))
    assert told.coming(clock) == {"demo": pytest.approx(30, abs=1), "other": 0.0}
    fleet.apply(with_instances(coming=coming[2:]))
    assert told.coming(clock) == {"other": 0.0}


def test_it_is_told_when_one_is_likely_to_serve_where_that_is_known() -> None:
    now = time.time()
    coming = (
        ComingConfig("a", "demo", 0.0, now + 40),
        ComingConfig("b", "demo", 0.0, now + 20),
        ComingConfig("c", "demo"),
    )
    fleet, told, clock = build(with_instances(coming=coming))
    (event,) = told.events
    assert (event.model, event.at) == ("demo", clock.now)
    assert event.serving == pytest.approx((clock.now + 20, clock.now + 40), abs=1)
    fleet.apply(with_instances(coming=coming[2:]))
    assert told.events[1:] == [ev.Expected("demo", clock.now)]


def test_nothing_is_said_twice() -> None:
    config = with_instances(coming=(ComingConfig("c", "other", 0.0, time.time() + 30),))
    fleet, told, clock = build(config)
    clock.now += 1
    fleet.sweep()
    fleet.sweep()
    assert len(told.events) == 1


def test_one_that_is_ready_and_has_not_answered_yet_is_on_its_way_for_a_moment() -> None:
    fleet, told, clock = build(with_instances(spec()))
    assert told.coming(clock) == {"demo": 0.0}
    fleet.silent("e1", GONE)  # the address of an earlier run, say
    assert told.coming(clock) == {"demo": 0.0}
    clock.now += REPLACED_WITHIN_S
    fleet.sweep()
    assert told.coming(clock) == {}


def test_one_that_answers_is_there() -> None:
    fleet, told, clock = build(with_instances(spec()))
    answers(fleet, clock)
    assert told.coming(clock) == {}


def test_a_process_that_ended_is_being_replaced() -> None:
    fleet, told, clock = build(with_instances(spec()))
    answers(fleet, clock)
    fleet.silent("e1", GONE)
    assert set(told.coming(clock)) == {"demo"}
    fleet.apply(with_instances(coming=(ComingConfig("e2", "demo"),)))
    clock.now += REPLACED_WITHIN_S
    fleet.sweep()
    assert set(told.coming(clock)) == {"demo"}


def test_no_one_comes_for_a_registered_endpoint_or_one_that_hangs() -> None:
    fleet, told, clock = build(with_instances(spec("e1", "static"), spec("e2")))
    fleet.silent("e1", GONE)
    answers(fleet, clock, "e2")
    assert told.coming(clock) == {}
    clock.now += DEAD_AFTER_S + 1
    fleet.silent("e2", EngineError("did not answer in time"))
    assert told.down == ["e2"]
    assert told.coming(clock) == {}


def test_one_that_drains_or_only_decodes_is_not_waited_for() -> None:
    _, told, clock = build(with_instances(spec("e1"), spec("e2", role=Role.DECODE), draining=("e1",)))
    assert told.coming(clock) == {}


def test_the_stored_configuration_keeps_what_is_coming() -> None:
    older, newer = {"id": "a", "model": "demo", "not_before": 5.0}, {"id": "b", "model": "demo", "serves_at": 9.0}
    coming = snapshot_from_json({"version": 3, "coming": [older, newer]}).coming
    assert coming == (ComingConfig("a", "demo", 5.0), ComingConfig("b", "demo", 0.0, 9.0))


# ---- through a whole gateway -----------------------------------------------------------------------------------------


async def test_requests_of_the_first_seconds_wait_for_the_first_engine() -> None:
    async with TestBed(with_instances(coming=(ComingConfig("e1", "demo"),))) as bed:
        clients = [bed.send(completion(stream=stream)) for stream in (True, False)]
        await until_on_loop(lambda: len(bed.gateway.scheduler.dispatcher.queue()) == 2)
        bed.gateway.configure(with_instances(spec(), version=3))
        answers = [await client.done() for client in clients]
        assert [answer.status for answer in answers] == [200, 200]
        assert {record.outcome for record in bed.sink.records} == {Outcome.OK}


async def test_no_longer_than_they_may() -> None:
    async with TestBed(with_instances(coming=(ComingConfig("e1", "demo"),))) as bed:
        answer = await bed.ask(completion(waiting_time=0.05))
        assert (answer.status, answer.error["code"]) == (504, "waiting_time_exceeded")
        answer = await bed.ask(completion(waiting_time=0))
        assert (answer.status, answer.error["code"]) == (503, "no_capacity")


async def test_refused_at_once_with_the_time_to_come_back_when_it_starts_too_late() -> None:
    coming = ComingConfig("e1", "demo", time.time() + 30)
    async with TestBed(with_instances(coming=(coming,))) as bed:
        answer = await bed.ask(completion(waiting_time=5))
        assert (answer.status, answer.error["code"]) == (503, "no_capacity")
        assert 28 <= int(answer.headers["retry-after"]) <= 30
        assert "the next one is expected in" in answer.error["message"]


async def test_who_waited_for_one_that_was_given_up_is_answered_then() -> None:
    async with TestBed(with_instances(coming=(ComingConfig("e1", "demo"),))) as bed:
        client = bed.send(completion())
        await until_on_loop(lambda: len(bed.gateway.scheduler.dispatcher.queue()) == 1)
        bed.gateway.configure(with_instances(version=3))
        answer = await client.done()
        assert (answer.status, answer.error["code"]) == (503, "no_capacity")
        assert "retry-after" in answer.headers


async def test_the_first_request_of_a_model_on_demand_is_served_by_the_instance_started_for_it() -> None:
    async with TestBed(with_instances(on_demand=("demo",))) as bed:
        client = bed.send(completion(waiting_time=30))
        await until_on_loop(lambda: len(bed.gateway.scheduler.dispatcher.queue()) == 1)
        coming = (ComingConfig("e1", "demo"),)
        bed.gateway.configure(with_instances(version=3, coming=coming, on_demand=("demo",)))
        bed.gateway.configure(with_instances(spec(), version=4, on_demand=("demo",)))
        assert (await client.done()).status == 200
        assert [(record.instance, record.outcome) for record in bed.sink.records] == [("e1", Outcome.OK)]


async def test_it_is_answered_at_once_if_nothing_can_be_started_any_more() -> None:
    """For example, because its launch template was paused."""
    async with TestBed(with_instances(on_demand=("demo",))) as bed:
        client = bed.send(completion(waiting_time=30))
        await until_on_loop(lambda: len(bed.gateway.scheduler.dispatcher.queue()) == 1)
        bed.gateway.configure(with_instances(version=3))
        answer = await client.done()
        assert (answer.status, answer.error["code"]) == (503, "no_capacity")
        assert "retry-after" in answer.headers


async def test_it_is_told_that_an_instance_was_starting_when_its_waiting_time_ends() -> None:
    async with TestBed(with_instances(on_demand=("demo",))) as bed:
        answer = await bed.ask(completion(waiting_time=0.05))
        assert answer.status == 504
        assert "an instance was still starting" in answer.error["message"]


@pytest.mark.parametrize("stream", [True, False])
async def test_the_only_engine_dies_and_its_replacement_gets_what_it_had(stream: bool) -> None:
    async with TestBed(with_instances(spec("e1"))) as bed:
        bed.backend("e1", Script(hang_after=0))
        old = bed.send(completion(stream=stream))
        await until_on_loop(lambda: bed.backend("e1").running == 1)
        bed.backend("e1").dead = True
        bed.gateway.runtime.lost(next(iter(bed.gateway.runtime.requests.values())), GONE)
        await until_on_loop(lambda: not bed.gateway.fleet.seats["e1"].up)
        new = bed.send(completion(stream=stream))
        await until_on_loop(lambda: len(bed.gateway.scheduler.dispatcher.queue()) == 2)
        bed.gateway.configure(with_instances(spec("e2"), version=3))
        assert [(await client.done()).status for client in (old, new)] == [200, 200]
        assert {record.instance for record in bed.sink.records} == {"e2"}


async def test_up_is_said_of_those_that_take_requests() -> None:
    async with TestBed(with_instances(spec("e1"), spec("e2"), spec("e3"), spec("e4"), draining=("e3",))) as bed:
        bed.backend("e2").load = Load(0.0, awake=False)
        bed.backend("e4").dead = True
        for name in bed.gateway.fleet.seats:
            bed.gateway.monitor.probe(name)
        await bed.gateway.monitor.settle(1)
        await asyncio.sleep(0)
        status, body = health(bed.gateway)
        assert status == 200
        assert body["instances"] == {"e1": "up", "e2": "asleep", "e3": "draining", "e4": "down"}


@pytest.mark.parametrize(
    ("config", "awake", "said", "status"),
    [
        (with_instances(spec()), True, "up", 200),
        (with_instances(spec("e1", role=Role.PREFILL), spec("e2", role=Role.DECODE)), True, "up", None),
        (with_instances(spec(), draining=("e1",), coming=(ComingConfig("e2", "demo"),)), True, "coming", 504),
        (with_instances(coming=(ComingConfig("e1", "demo"),)), True, "coming", 504),
        (with_instances(spec()), False, "coming", 504),
        (with_instances(spec(), draining=("e1",)), True, "none", 503),
        (with_instances(spec("e2", role=Role.DECODE)), True, "none", 503),
        (with_instances(spec(role=Role.PREFILL)), True, "undecoded", 503),
        (with_instances(spec(role=Role.PREFILL)), False, "coming", 504),
        (with_instances(spec(role=Role.PREFILL), spec("e2", role=Role.DECODE)), True, "up", None),
        (with_instances(spec(role=Role.PREFILL), spec("e2")), True, "up", None),
        (with_instances(), True, "none", 503),
        (with_instances(on_demand=("demo",)), True, "on_demand", 504),
        (with_instances(on_demand=("other",)), True, "none", 503),
        (with_instances(spec(), draining=("e1",), on_demand=("demo",)), True, "on_demand", 504),
        (with_instances(coming=(ComingConfig("e1", "demo"),), on_demand=("demo",)), True, "coming", 504),
        (with_instances(spec(), on_demand=("demo",)), True, "up", 200),
    ],
)
async def test_what_pages_are_told_of_a_model_is_what_its_requests_find(
    config: GatewaySnapshot, awake: bool, said: str, status: int | None
) -> None:
    async with TestBed(config) as bed:
        for name in bed.gateway.fleet.seats:
            bed.backend(name).load = Load(0.0, awake=awake)
            bed.gateway.monitor.probe(name)
        await bed.gateway.monitor.settle(1)
        await asyncio.sleep(0)
        assert fleet_message(bed.gateway, 1, [])["capacity"] == {"demo": said}
        if status is not None:
            assert (await bed.ask(completion(waiting_time=0.05))).status == status


async def test_a_model_without_any_instance_is_told_of_too() -> None:
    models = (ModelConfig("demo"), ModelConfig("other"))
    async with TestBed(replace(snapshot(("e1",)), models=models)) as bed:
        assert fleet_message(bed.gateway, 1, [])["capacity"] == {"demo": "up", "other": "none"}
