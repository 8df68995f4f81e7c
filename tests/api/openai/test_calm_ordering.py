"""The ordering `calm` in a real gateway, over reference engines of unlike speed."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import aiohttp
import pytest

from api.openai.gateway import Gateway, GatewayOptions
from controller.core import events as ev
from controller.core.snapshot import ModelConfig
from controller.core.types import InstanceSpec, LatencyCoefficients
from controller.dispatch.event_log import Log
from controller.simulator.replay import Replay
from tests.api.openai.gateways import TestBed, completion, snapshot
from tests.workers.engine.process import EngineProcess

OVERRIDES = {
    "ordering": {"name": "calm"},
    "pacing": {"name": "fixed_window", "window": 1},
    "admission": {"name": "admit_all"},
    "routing": {"name": "least_outstanding"},
    "dispatch": {"refuse_infeasible": False},
}
QUICK_S, SLOW_S = 0.01, 0.05


def spec(engine: EngineProcess, name: str, step_s: float) -> InstanceSpec:
    latency = LatencyCoefficients(step_s, 0.0, 0.0, step_s, 0.0, 0.0)
    return InstanceSpec(name, "demo", url=engine.url, backend="reference", max_num_seqs=1, latency=latency)


@asynccontextmanager
async def unlike_fleet(log: Path) -> AsyncIterator[TestBed]:
    options = ("--model", "demo", "--max-num-seqs", "1", "--max-model-len", "4096", "--profile")
    with EngineProcess(*options, "constant:10ms") as quick, EngineProcess(*options, "constant:50ms") as slow:
        async with aiohttp.ClientSession() as session:
            instances = (spec(slow, "slow", SLOW_S), spec(quick, "quick", QUICK_S))
            models = (ModelConfig("demo", context_tokens=4096),)
            bed = TestBed(replace(snapshot(()), instances=instances, models=models))
            bed.gateway = Gateway(GatewayOptions("test", "slackline", OVERRIDES, scheduler_log=log), session, bed.sink)
            async with bed:
                yield bed


async def test_a_deadline_that_one_engine_alone_can_keep_waits_for_it(tmp_path):
    """Both engines are busy, the slow one for less long. 100 tokens take 1 s on the quick one and 5 s on the slow one:
    the first to wait has 4.5 s, the other a minute."""
    async with unlike_fleet(tmp_path / "log") as bed:
        body = completion(ignore_eos=True, target_ttft=3, target_tbt=5, waiting_time=60)
        busy = [bed.send({**body, "max_tokens": 180})]
        await asyncio.sleep(0.1)
        busy.append(bed.send({**body, "max_tokens": 20}))
        await asyncio.sleep(0.3)
        tight = bed.send({**body, "max_tokens": 100, "deadline": 4.5})
        await asyncio.sleep(0.1)
        loose = bed.send({**body, "max_tokens": 30, "deadline": 60})
        for client in (*busy, tight, loose):
            await asyncio.wait_for(client.task, 30)
            assert client.answer.status == 200, client.answer.body
        records = {record.target_deadline_s: record for record in bed.sink.records}
        assert {deadline: records[deadline].instance for deadline in (4.5, 60)} == {4.5: "quick", 60: "slow"}
        assert records[4.5].deadline_met
        assert records[60].queue_s < records[4.5].queue_s, "the slow engine was free first"
        step = next(step for step in records[60].decisions if step["kind"] == "dispatch")
        assert step["reason"] == "goodput_window"
        assert step["figures"]["goodput_rate"] > 0
    replay = Replay(Log((tmp_path / "log").read_text().splitlines()))
    assert list(replay.differences()) == [], "the simulator's dispatcher decides as the gateway's did"
    assert replay.kinds["Send"] == 4


@pytest.mark.parametrize(("asked", "left_s"), [({}, [None]), ({"workflow_deadline": 30}, [30.0])])
async def test_the_order_hears_how_long_a_workflow_has(tmp_path, asked, left_s):
    """Its request's own deadline is that of its step."""
    async with aiohttp.ClientSession() as session:
        bed = TestBed(snapshot())
        options = GatewayOptions("test", "slackline", OVERRIDES, scheduler_log=tmp_path / "log")
        bed.gateway = Gateway(options, session, bed.sink)
        async with bed:
            assert (await bed.ask(completion(**asked, metadata={"workflow_id": "w"}))).status == 200
    log = Log((tmp_path / "log").read_text().splitlines())
    events = [event for batch in log.batches() for event in batch.events]
    assert [event.request.workflow_left_s for event in events if isinstance(event, ev.Arrived)] == left_s
