"""Refusals on their way to the audit: one decision a batch, nothing lost and nothing piled up during an outage."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import orjson
import pytest

from api.openai import status
from api.openai.publisher import MESSAGES_A_TICK, REFUSALS_S, Publisher
from controller.core.decisions import DecisionMessage
from controller.core.messages import LIVE_QUEUE, CommandAnswer, FleetMessage, QueueState
from controller.core.snapshot import ModelConfig, TenantConfig
from controller.core.types import InstanceSpec
from tests.api.openai.gateways import TestBed, completion, snapshot
from workers.live import LiveUnavailable


class Board:
    """Redis: nobody watches, until somebody does."""

    def __init__(self) -> None:
        self.watching: set[str] = set()
        self.asked = 0
        self.away = False
        self.wholes: list[QueueState] = []
        self.sent: list[tuple[str, Any]] = []
        self.fleet: list[FleetMessage] = []

    async def watched(self, topics: list[str]) -> set[str]:
        if self.away:
            raise LiveUnavailable("Redis is unavailable: test")
        return self.watching

    async def publish_fleet(self, message: FleetMessage, ttl_s: float) -> None:
        self.sent.append(("fleet", message))

    async def aread_fleet(self) -> list[FleetMessage]:
        return self.fleet

    async def server_time(self) -> float:
        if self.away:
            raise LiveUnavailable("Redis is unavailable: test")
        return time.time()

    async def queue_asked(self) -> int:
        return self.asked

    async def publish_queue(self, state: QueueState) -> None:
        self.wholes.append(state)

    async def send(self, topic: str, data: Any) -> None:
        self.sent.append((topic, data))

    async def answer(self, answer: CommandAnswer) -> None:
        self.sent.append(("answer", answer))


class Audit:
    def __init__(self) -> None:
        self.away = False
        self.rows: list[Mapping[str, Any]] = []

    def refusals(self, gateway: str, figures: Mapping[str, Any]) -> DecisionMessage:
        if self.away:
            raise ConnectionError("the database is unavailable")
        self.rows.append(figures)
        return DecisionMessage(id="d1", at=0.0, sentence="", figures_text="")

    def keys_used(self, key_ids: Iterable[int]) -> None:
        return None


async def test_refusals_of_an_outage_become_one_decision_over_its_whole_time() -> None:
    config = snapshot(tenants=(TenantConfig(1, "acme", "chat", rpm=1),))
    async with TestBed(config) as bed:
        audit, board = Audit(), Board()
        publisher = Publisher(bed.gateway, board, audit)
        start = bed.gateway.clock()
        for _ in range(4):
            await bed.ask(completion())
        assert len(bed.gateway.ledger.refusals) == 1, "counted, not listed"
        audit.away = True
        await publisher._refusals(start + REFUSALS_S)
        assert bed.gateway.ledger.refusals.total() == 3
        await bed.ask(completion())
        audit.away = False
        await publisher._refusals(start + 3 * REFUSALS_S)
        (row,) = audit.rows
        assert (row["requests"], row["by_code"], row["by_class"]) == (4, {"rate_limit_exceeded": 4}, {"acme/chat": 4})
        assert 29.0 < row["seconds"] <= 30.0
        assert not bed.gateway.ledger.refusals
        await bed.ask(completion())
        await publisher._refusals(start + 4 * REFUSALS_S)
        assert 9.0 < audit.rows[-1]["seconds"] <= 10.0
        assert [topic for topic, _ in board.sent] == ["live.decisions"] * 2
        publisher.close()


async def test_traffic_is_told_by_model() -> None:
    """The scaler of one model must not see another's rush."""
    models = (ModelConfig("demo"), ModelConfig("other"))
    instances = (InstanceSpec("e1", "demo", backend="fake"), InstanceSpec("e2", "other", backend="fake"))
    async with TestBed(replace(snapshot(models=models), instances=instances)) as bed:
        for _ in range(3):
            await bed.ask(completion())
        await bed.ask(completion(model="other"))
        message = status.fleet_message(bed.gateway, 1, [])
        rates = {name: (one["arrival_rate"], one["service_rate"]) for name, one in message["models"].items()}
        assert rates == {"demo": (0.3, 0.3), "other": (0.1, 0.1)}
        assert (message["arrival_rate"], message["service_rate"]) == pytest.approx((0.4, 0.4))
        assert {one["queued"] for one in message["models"].values()} == {0}


async def test_the_queue_is_told_while_somebody_watches_changes_only_and_whole_when_asked() -> None:
    async with TestBed(snapshot(instances=("e1",))) as bed:
        board = Board()
        publisher = Publisher(bed.gateway, board, Audit())

        def told() -> list[Any]:
            found = [data for topic, data in board.sent if topic == LIVE_QUEUE]
            board.sent.clear()
            return found

        clients = [bed.send(completion(max_tokens=4)) for _ in range(3)]
        await publisher.tick()
        assert told() == []
        assert not bed.gateway.scheduler.dispatcher.journal.following
        board.watching = {LIVE_QUEUE}
        await publisher.tick()
        (first,) = told()
        assert (first["base"], first["version"], first["total"]) == (
            0,
            0,
            len(bed.gateway.scheduler.dispatcher.queue()),
        )
        assert board.wholes == []
        board.asked = 1
        await publisher.tick()
        (whole,) = board.wholes
        assert (whole["feed"], whole["asked"]) == (first["feed"], 1)
        for client in clients:
            await client.done()
        await publisher.tick()
        assert told()[-1]["total"] == len(bed.gateway.scheduler.dispatcher.queue()) == 0
        assert len(board.wholes) == 1, "asked once, told once"
        board.watching = set()
        await publisher.tick()
        assert not bed.gateway.scheduler.dispatcher.journal.following
        board.watching = {LIVE_QUEUE}
        await publisher.tick()
        assert told()[0]["feed"] != first["feed"]
        board.away = True
        await publisher.tick()
        assert not bed.gateway.scheduler.dispatcher.journal.following, "nothing piles up while Redis is unavailable"
        publisher.close()


class JsonBoard(Board):
    """As Redis takes it: as JSON."""

    async def publish_fleet(self, message: FleetMessage, ttl_s: float) -> None:
        orjson.dumps(message)
        await super().publish_fleet(message, ttl_s)


async def test_a_figure_that_json_cannot_hold_stops_nothing_else(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Found by attack: an engine's figure of more than 64 bits ended every tick, so the console had no queue either."""
    usual = status.fleet_message
    monkeypatch.setattr(status, "fleet_message", lambda *told: {**usual(*told), "queued_tokens": int(1.7e308)})
    async with TestBed(snapshot(tenants=(TenantConfig(1, "acme", "chat", rpm=0),))) as bed:
        await bed.ask(completion())
        audit, board = Audit(), JsonBoard()
        publisher = Publisher(bed.gateway, board, audit)
        board.watching = {LIVE_QUEUE}
        for _ in range(3):
            publisher._published_at = publisher._refusals_at = -60.0
            await publisher.tick()
        assert [topic for topic, _ in board.sent].count(LIVE_QUEUE) == 3
        assert [row["requests"] for row in audit.rows] == [1]
        assert len([each for each in caplog.records if "cannot be published" in each.getMessage()]) == 1
        failures = [
            (of, count) for name, _, of, count in status.gauges(bed.gateway) if name == "publish_failures_total"
        ]
        assert failures == [({"part": "fleet"}, 3)]
        monkeypatch.setattr(status, "fleet_message", usual)
        publisher._published_at = -60.0
        await publisher.tick()
        assert [topic for topic, _ in board.sent].count("fleet") == 1
        publisher.close()


class Moved:
    """A feed with `parts` messages to tell."""

    def __init__(self, parts: int) -> None:
        self.left = parts

    @property
    def behind(self) -> bool:
        return self.left > 0

    def changes(self, rates: Mapping[str, float]) -> dict[str, int]:
        self.left = max(0, self.left - 1)
        return {"left": self.left}

    def stop(self) -> None:
        self.left = 0


async def test_a_queue_that_moves_at_once_is_told_in_several_messages_a_tick_but_not_in_endless_ones() -> None:
    async with TestBed(snapshot(instances=("e1",))) as bed:
        board = Board()
        board.watching = {LIVE_QUEUE}
        publisher = Publisher(bed.gateway, board, Audit())
        publisher._feed = Moved(MESSAGES_A_TICK + 3)  # type: ignore[assignment]
        ticks = []
        for _ in range(3):
            await publisher.tick()
            ticks.append(len([data for topic, data in board.sent if topic == LIVE_QUEUE]))
            board.sent.clear()
        assert ticks == [MESSAGES_A_TICK, 3, 1]
        publisher.close()
