"""Waiting times of requests that share a call at an engine that is sent everything, which ends what waits too long."""

from __future__ import annotations

import asyncio

import pytest

from tests.api.openai.gateways import completion
from tests.api.openai.test_hints import over, spec
from tests.waiting import until_on_loop
from tests.workers.engine.process import EngineProcess

ONE_SLOT = ("--model", "demo", "--profile", "constant:20ms", "--max-num-seqs", "1", "--batching", "calm")
HASTY_S, PATIENT_S = 0.5, 30.0


@pytest.mark.parametrize(
    ("first_s", "second_s", "apart_s"),
    [
        pytest.param(HASTY_S, PATIENT_S, 0.2, id="joins one that waits less"),
        pytest.param(HASTY_S, PATIENT_S, 0.0, id="both before the call is sent"),
        pytest.param(PATIENT_S, HASTY_S, 0.0, id="both before the call is sent, the patient one first"),
        pytest.param(PATIENT_S, HASTY_S, 0.2, id="comes to one that waits longer"),
    ],
)
@pytest.mark.sampled(2)
@pytest.mark.parametrize("stream", [False, True])
async def test_each_waits_for_its_own_time_at_an_engine_that_is_sent_everything(first_s, second_s, apart_s, stream):
    """The only slot is taken for longer than one of them waits, and the other one gets it then."""
    with EngineProcess(*ONE_SLOT) as engine:
        async with over(spec(engine)) as bed:
            body = completion(ignore_eos=True, target_ttft=50, target_tbt=5)
            running = bed.send({**body, "max_tokens": 75, "waiting_time": 60})
            await asyncio.sleep(0.3)
            equal = {**body, "max_tokens": 4, "temperature": 0, "share_call": True, "stream": stream}
            first = bed.send({**equal, "waiting_time": first_s})
            await asyncio.sleep(apart_s)
            second = bed.send({**equal, "waiting_time": second_s})
            hasty, patient = (first, second) if first_s < second_s else (second, first)
            told = await asyncio.wait_for(hasty.done(), 10)
            assert not running.task.done(), "its slot was taken all the time"
            assert (told.status, told.error["code"]) == (504, "waiting_time_exceeded")
            assert (await asyncio.wait_for(patient.done(), 10)).status == 200
            await running.done()
            await until_on_loop(lambda: len(bed.sink.records) == 3)
            ended = next(record for record in bed.sink.records if record.outcome != "ok")
            assert (ended.outcome, HASTY_S <= ended.e2e_s < HASTY_S + 0.6) == ("expired", True)
            assert [step["kind"] for step in ended.decisions].count("expire") == 1


async def test_those_that_wait_equally_long_end_one_by_one():
    with EngineProcess(*ONE_SLOT) as engine:
        async with over(spec(engine)) as bed:
            body = completion(ignore_eos=True, target_ttft=50, target_tbt=5)
            running = bed.send({**body, "max_tokens": 90, "waiting_time": 60})
            await asyncio.sleep(0.3)
            equal = {**body, "temperature": 0, "share_call": True, "waiting_time": HASTY_S}
            first = bed.send(equal)
            await asyncio.sleep(0.3)
            second = bed.send(equal)
            for client in (first, second):
                assert (await client.done()).status == 504
            assert bed.gateway.shared_calls.shared["acme"] == 1
            assert not running.task.done(), "its slot was taken all the time"
            ended = [record for record in bed.sink.records if record.outcome == "expired"]
            assert [HASTY_S <= record.e2e_s < HASTY_S + 0.25 for record in ended] == [True, True]
            await running.done()
