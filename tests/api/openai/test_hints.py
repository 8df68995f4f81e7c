"""What a gateway knows of deadlines and lengths decides what a reference engine runs next."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace

import aiohttp

from api.openai.gateway import Gateway, GatewayOptions
from controller.core.snapshot import ModelConfig
from controller.core.types import InstanceSpec
from controller.predict.answer_lengths import LengthsInForce
from tests.api.openai.gateways import TestBed, completion, snapshot
from tests.controller.predict.test_answer_lengths import forest
from tests.workers.engine.process import EngineProcess


@asynccontextmanager
async def over(engine: EngineProcess) -> AsyncIterator[TestBed]:
    """A gateway whose one instance is this engine, which is sent everything."""
    spec = InstanceSpec("e1", "demo", url=engine.url, backend="reference", selects=True)
    async with aiohttp.ClientSession() as session:
        bed = TestBed(replace(snapshot(()), instances=(spec,), models=(ModelConfig("demo", context_tokens=4096),)))
        bed.gateway = Gateway(GatewayOptions("test"), session, bed.sink)
        async with bed:
            yield bed


async def test_the_engine_runs_first_what_is_foretold_to_be_shortest():
    """Both may have 400 tokens, and the longer one comes first. The client's own bounds are not believed."""
    options = ("--model", "demo", "--profile", "constant:2ms", "--max-num-seqs", "1", "--max-model-len", "4096")
    with EngineProcess(*options, "--batching", "shortest_job_first", "--batching-options", '{"slots": 1}') as engine:
        async with over(engine) as bed:
            bed.gateway.answer_lengths.take({"demo": LengthsInForce(7, forest())})
            body = completion(max_tokens=400, ignore_eos=True, target_ttft=50, target_tbt=5, waiting_time=60)
            running = bed.send({**body, "prompt": [1] * 200})
            await asyncio.sleep(0.3)
            longer = bed.send({**body, "prompt": [1] * 1900, "length_lower": 1, "length_upper": 1})
            await asyncio.sleep(0.1)
            shorter = bed.send({**body, "prompt": [1] * 300})
            for client in (running, longer, shorter):
                await asyncio.wait_for(client.task, 20)
                assert client.answer.status == 200, client.answer.body
            assert [record.prompt_tokens for record in bed.sink.records] == [200, 300, 1900]
