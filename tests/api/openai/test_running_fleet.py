"""A gateway that starts into a running fleet, and an engine that restarts behind its address: telemetry to dispatch."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from api.openai.status import fleet_message
from controller.core.types import Load
from tests.api.openai.gateways import TestBed, completion, snapshot
from tests.waiting import until_on_loop
from workers.backends.fake import FakeBackend, Script


class Engine:
    """What the engine of the test reports next."""

    def __init__(self) -> None:
        self.now: dict[str, int] = {}

    def reports(self, **fields: int) -> None:
        self.now = fields


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Engine:
    found = Engine()

    async def telemetry(self: FakeBackend, now: float) -> Load:
        return Load(now, max_num_seqs=32, **found.now)

    monkeypatch.setattr(FakeBackend, "telemetry", telemetry)
    return found


async def polled(bed: TestBed) -> Any:
    """The engine's state after another poll, a period later."""
    instance = bed.gateway.scheduler.dispatcher._fleet.instances["e1"]
    await asyncio.sleep(0.05)
    before = instance.load
    bed.gateway.monitor.probe("e1")
    await until_on_loop(lambda: instance.load is not before)
    return instance


async def test_a_new_gateway_sends_nothing_to_an_engine_that_others_have_filled(engine: Engine) -> None:
    engine.reports(running=30, waiting=2)
    async with TestBed(snapshot(("e1",))) as bed:
        client = bed.send(completion())
        await asyncio.sleep(0.1)
        assert (len(bed.backend("e1").calls), len(bed.gateway.scheduler.queue())) == (0, 1)
        engine.reports(running=3)
        await polled(bed)
        await polled(bed)
        assert (await client.done()).status == 200


async def test_it_counts_the_others_from_its_first_telemetry(engine: Engine) -> None:
    engine.reports(running=20, waiting=4)
    async with TestBed(snapshot(("e1",))) as bed:
        (state,) = bed.gateway.scheduler.fleet(bed.gateway.clock())
        assert (state.running, state.waiting) == (20, 4)
        assert state.utilisation == pytest.approx(0.75)


async def test_its_own_requests_are_not_taken_for_others_in_a_first_report(engine: Engine) -> None:
    engine.reports(running=0)
    async with TestBed(snapshot(("e1",))) as bed:
        bed.every(Script(tokens=3, token_delay_s=0.2))
        client = bed.send(completion(stream=True))
        await until_on_loop(lambda: bed.backend("e1").running == 1)
        bed.gateway.scheduler.dispatcher._fleet.instances["e1"].load = None  # as if it had not been polled yet
        engine.reports(running=2)
        instance = await polled(bed)
        assert instance._others_count == 0
        assert (await client.done()).status == 200


async def test_counters_of_an_engine_that_restarts_begin_at_zero(engine: Engine) -> None:
    """Others go on prefilling there: their computing time is counted in the interval of the restart too."""
    engine.reports(running=4, prompt_tokens_total=1_000_000)
    async with TestBed(snapshot(("e1",))) as bed:
        engine.reports(running=4, prompt_tokens_total=1_001_000)
        instance = await polled(bed)
        before = instance._others_prefill_rate
        assert before > 0
        engine.reports(running=4, prompt_tokens_total=1_000)
        instance = await polled(bed)
        assert instance._others_prefill_rate == pytest.approx(before, rel=0.9)
        assert instance._others_prefill_rate > 0
        engine.reports(running=0, prompt_tokens_total=1_000)
        instance = await polled(bed)
        instance = await polled(bed)
        (state,) = bed.gateway.scheduler.fleet(bed.gateway.clock() + 60)  # computing is averaged over seconds
        assert (instance._others_prefill_rate, state.running) == (0.0, 0)
        assert state.utilisation < 1e-4


async def test_our_own_prompts_before_a_restart_are_not_charged_to_others(engine: Engine) -> None:
    engine.reports(prompt_tokens_total=50_000)
    async with TestBed(snapshot(("e1",))) as bed:
        assert (await bed.ask(completion())).status == 200
        engine.reports(running=1, prompt_tokens_total=2)
        instance = await polled(bed)
        assert instance._others_prefill_rate == 0.0


async def test_its_message_says_for_how_long_it_has_counted(engine: Engine) -> None:
    """The scaler does not take what it has not seen yet for low load (decision 309)."""
    async with TestBed(snapshot(("e1",))) as bed:
        assert 0.0 <= fleet_message(bed.gateway, 1, [])["counted_s"] < 30.0
        bed.gateway.started_at -= 60.0
        assert fleet_message(bed.gateway, 2, [])["counted_s"] >= 60.0
