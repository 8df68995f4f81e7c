"""Several gateways before one fleet split it without talking to each other."""

from __future__ import annotations

from typing import Any

import pytest

from api.openai.publisher import Publisher
from api.openai.state.shares import Shares
from controller.core import events as ev
from controller.core.snapshot import TenantConfig
from controller.core.types import Load
from controller.dispatch import build_dispatcher
from tests.api.openai.gateways import TestBed, completion, snapshot
from tests.api.openai.test_publisher import Audit, Board
from tests.controller.dispatch.fleet import request, sends, up


def message(gateway: str, *, at: float = 100.0, queued: int = 0, in_flight: int = 0) -> Any:
    return {"gateway": gateway, "at": at, "period_s": 1.0, "queued": queued, "in_flight": in_flight}


def test_alone_the_whole_fleet_is_its_own():
    assert Shares("a").of([message("a", in_flight=3)], 100.0) == pytest.approx(1.0)
    assert Shares("a").of([], 100.0) == pytest.approx(1.0)


def test_every_gateway_computes_the_same_split_and_it_adds_up():
    seen = [message("a", queued=30, in_flight=10), message("b", in_flight=10), message("c")]
    parts = {name: Shares(name).of(seen, 100.0) for name in "abc"}
    assert parts == pytest.approx({"a": 0.2 / 3 + 0.8 * 0.8, "b": 0.2 / 3 + 0.8 * 0.2, "c": 0.2 / 3})
    assert sum(parts.values()) == pytest.approx(1.0)


def test_idle_gateways_share_equally():
    assert Shares("a").of([message("a"), message("b")], 100.0) == pytest.approx(0.5)


def test_a_gateway_not_heard_of_for_three_periods_has_no_part():
    seen = [message("a", in_flight=1), message("b", at=96.0, in_flight=9)]
    assert Shares("a").of(seen, 100.0) == pytest.approx(1.0)


def test_the_dispatcher_hears_of_real_changes_and_new_instances_only():
    shares = Shares("a")
    assert shares.changes(1.0, ["e1"]) == []
    assert shares.changes(0.5, ["e1"]) == [ev.SharesChanged("e1", 0.5)]
    assert shares.changes(0.51, ["e1"]) == []
    assert shares.changes(0.51, ["e1", "e2"]) == [ev.SharesChanged("e2", 0.51)]
    assert [change.instance_id for change in shares.changes(1.0, ["e1", "e2"])] == ["e1", "e2"]


def test_an_instance_that_left_and_came_back_is_told_again():
    shares = Shares("a")
    shares.changes(0.5, ["e1"])
    shares.changes(0.5, [])
    assert shares.changes(0.5, ["e1"]) == [ev.SharesChanged("e1", 0.5)]


async def test_a_second_gateway_takes_its_part_from_the_first() -> None:
    async with TestBed(snapshot()) as bed:
        board = Board()
        board.fleet = [message(bed.gateway.options.name), message("other")]
        publisher = Publisher(bed.gateway, board, Audit())
        for entry in board.fleet:
            entry["at"] = 1e12  # never stale here
        await publisher.tick()
        bed.gateway.runtime._pass()
        assert {each.slots for each in bed.gateway.scheduler.dispatcher._fleet.instances.values()} == {16}
        publisher.close()


async def test_without_redis_quotas_and_shares_stay_as_last_known_and_the_log_says_so(caplog) -> None:
    config = snapshot(tenants=(TenantConfig(1, "acme", "chat", rpm=2),))
    async with TestBed(config) as bed:
        board = Board()
        board.fleet = [{**message(name), "at": 1e12} for name in (bed.gateway.options.name, "other")]
        publisher = Publisher(bed.gateway, board, Audit())
        await publisher.tick()
        board.away, board.fleet = True, []
        statuses = []
        for _ in range(3):
            await publisher.tick()
            statuses.append((await bed.ask(completion())).status)
        assert statuses == [200, 200, 429]
        assert {each.slots for each in bed.gateway.scheduler.dispatcher._fleet.instances.values()} == {16}
        publisher.close()
    told = [record.message for record in caplog.records if "quotas and shares stay as last known" in record.message]
    assert len(told) == 1


def test_load_of_the_other_gateway_is_not_taken_from_ones_own_share_as_well():
    dispatcher = build_dispatcher("slackline")
    dispatcher.handle([up(slots=8), ev.SharesChanged("w", 0.5)], 0.0)
    for at in (1.0, 2.0):
        dispatcher.handle([ev.Telemetry("w", Load(at, running=4))], at)
    reply = dispatcher.handle([ev.Arrived(request(f"r{i}", 2.0, ttft=20.0, prompt=10)) for i in range(8)], 2.0)
    assert len(sends(reply)) == 4
