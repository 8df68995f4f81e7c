"""What a gateway knows of deadlines and lengths decides what a reference engine runs next."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from hashlib import sha256

import aiohttp
import pytest

from api.openai.gateway import Gateway, GatewayOptions
from api.openai.state.bounds_teller import MOST_BOUNDS, BoundsTeller
from api.openai.state.length_refinements import LengthRefinements
from controller.core.snapshot import ModelConfig
from controller.core.types import InstanceSpec, Role
from controller.dispatch.lifecycle import State
from controller.predict.answer_lengths import LengthsInForce
from tests.api.openai.gateways import TestBed, completion, snapshot
from tests.controller.predict.test_answer_lengths import forest
from tests.workers.engine.client import post
from tests.workers.engine.process import FLEET, EngineProcess, fleet
from workers.backends.base import EngineError
from workers.backends.fake import FakeBackend
from workers.backends.reference import ReferenceBackend
from workers.engine.errors import HttpError
from workers.engine.http.bounds import parse_bounds


@asynccontextmanager
async def over(*specs: InstanceSpec) -> AsyncIterator[TestBed]:
    """A gateway over these instances."""
    async with aiohttp.ClientSession() as session:
        bed = TestBed(replace(snapshot(()), instances=specs, models=(ModelConfig("demo", context_tokens=4096),)))
        bed.gateway = Gateway(GatewayOptions("test"), session, bed.sink)
        async with bed:
            yield bed


def spec(engine: EngineProcess, name: str = "e1", role: Role = Role.COLLOCATED, selects: bool = True) -> InstanceSpec:
    """`selects`: it is sent everything at once."""
    return InstanceSpec(name, "demo", url=engine.url, backend="reference", role=role, selects=selects)


async def test_the_engine_runs_first_what_is_foretold_to_be_shortest():
    """Both may have 400 tokens, and the longer one comes first. The client's own bounds are not believed."""
    options = ("--model", "demo", "--profile", "constant:2ms", "--max-num-seqs", "1", "--max-model-len", "4096")
    with EngineProcess(*options, "--batching", "shortest_job_first", "--batching-options", '{"slots": 1}') as engine:
        async with over(spec(engine)) as bed:
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


async def test_the_engine_hears_the_bounds_of_a_running_answer_again(monkeypatch):
    monkeypatch.setenv("FLEET_TOKEN", FLEET["token"])
    options = ("--model", "demo", "--profile", "constant:5ms", "--max-model-len", "4096")
    with EngineProcess(*options, token=FLEET["token"]) as engine:
        async with over(spec(engine)) as bed:
            await follow_one_answer(bed)
            assert await told(engine) == 2


async def test_a_decode_engine_hears_bounds_and_later_ones(monkeypatch):
    """Later bounds count only for a request that came with some."""
    monkeypatch.setenv("FLEET_TOKEN", FLEET["token"])
    options = ("--model", "demo", "--profile", "constant:5ms", "--max-model-len", "4096")
    kv = ("--kv-layers", "1", "--kv-token-bytes", "64")
    with fleet(p=(*options, *kv, "--role", "prefill"), d=(*options, *kv, "--role", "decode")) as engines:
        roles = {"p": Role.PREFILL, "d": Role.DECODE}
        async with over(*(spec(engines[name], name, role, selects=False) for name, role in roles.items())) as bed:
            await follow_one_answer(bed)
            (record,) = bed.sink.records
            assert (record.prefill_instance, record.instance) == ("p", "d")
            assert (await told(engines["p"]), await told(engines["d"])) == (0, 2)


async def test_an_engine_that_refuses_bounds_serves_on_and_is_left_alone(monkeypatch):
    """It has no token, so no caller can prove that it belongs to its fleet."""
    monkeypatch.setenv("FLEET_TOKEN", FLEET["token"])
    options = ("--model", "demo", "--profile", "constant:5ms", "--max-model-len", "4096")
    with EngineProcess(*options, token="") as engine:
        async with over(spec(engine)) as bed:
            refinements = await follow_one_answer(bed)
            assert await told(engine) == 0
            assert list(refinements._engines.refused) == ["e1"]


async def follow_one_answer(bed: TestBed) -> LengthRefinements:
    bed.gateway.answer_lengths.take({"demo": LengthsInForce(7, forest())})
    refinements = LengthRefinements(bed.gateway.answer_lengths, bed.gateway.runtime)
    body = completion(prompt=[1] * 200, max_tokens=130, ignore_eos=True, stream=True, target_ttft=50, waiting_time=60)
    client = bed.send(body)
    while not client.task.done():
        await refinements.refine()
        await asyncio.sleep(0.01)
    refinements.close()
    assert (await client.done()).status == 200
    await bed.gateway.runtime.drain(5)
    return refinements


async def told(engine: EngineProcess) -> float:
    """Bounds that it was told again, by its metrics."""
    async with aiohttp.ClientSession() as session, session.get(f"{engine.url}/metrics") as response:
        text = await response.text()
    name = "slackline_length_bounds_told_total "
    return next(float(line.split()[-1]) for line in text.splitlines() if line.startswith(name))


# By field: what the engine refuses.
REFUSED = {
    **dict.fromkeys(("due_in", "workflow_due_in", "waiting_in", "waited", "kv_checkpoint"), "x"),
    **{"value": -1, "length_lower": -1, "length_upper": 0, "workflow": 5, "tenant": 5, "kv_branch_of": 5},
    **{"kv_transfer_params": 5, "cache_salt": 5},
}
# What would be worth something to a client.
FORGED = {
    **{"due_in": 0.001, "workflow_due_in": 0.001, "waiting_in": 86_000, "waited": 8.999, "value": 1e9},
    **{"length_lower": 1, "length_upper": 1, "workflow": "w", "tenant": "another", "kv_checkpoint": 3_600},
    **{"kv_branch_of": "req-1", "cache_salt": "another", "request_id": "mine"},
    "vllm_xargs": {"slackline_ttft": 0.001, "slackline_ttft_left": 0, "SLACKLINE_value": 1e6, "mine": 1},
}


async def test_what_only_a_gateway_may_tell_an_engine_is_taken_from_no_client(monkeypatch):
    """The engine itself refuses each of these values, and takes those of the second body: none of either comes through,
    and what the gateway tells is there once."""
    said = []
    body_of = ReferenceBackend.body_of
    monkeypatch.setattr(ReferenceBackend, "body_of", lambda self, call: said.append(body_of(self, call)) or said[-1])
    asked = {"target_ttft": 9, "target_tbt": 2, "deadline": 30, "waiting_time": 20, "metadata": {"workflow_id": "w"}}
    with EngineProcess("--model", "demo", "--profile", "constant:2ms") as engine:
        async with over(spec(engine)) as bed, aiohttp.ClientSession(engine.url) as http:
            for field, value in REFUSED.items():
                status, refused = await post(http, "/v1/completions", {"prompt": "a", field: value})
                assert (status, refused["error"]["param"].split(".")[0]) == (400, field)
                assert (await bed.ask(completion(**{field: value}))).status == 200, field
            bed.gateway.answer_lengths.take({"demo": LengthsInForce(7, forest())})
            messages = {"model": "demo", "messages": [{"role": "user", "content": "a"}], "max_tokens": 4}
            response = {"model": "demo", "input": "a", "max_output_tokens": 4}
            said.clear()
            for path, body in (("completions", completion()), ("chat/completions", messages), ("responses", response)):
                assert (await bed.ask({**body, **asked, **FORGED}, f"/v1/{path}")).status == 200, path
    assert len(said) == 3
    for raw in said:
        names = [name for name, _ in json.loads(raw, object_pairs_hook=list)]
        told = json.loads(raw)
        assert sorted(names) == sorted(set(names)), "twice: whoever reads it may take the other one"
        assert not {"workflow_due_in", "workflow", "value", "kv_checkpoint", "kv_branch_of", "cache_salt"} & told.keys()
        assert (told["target_ttft"], told["target_tbt"], told["tenant"]) == (9, 2, sha256(b"acme").hexdigest()[:16])
        assert 0 <= told["waited"] < 9
        assert 20 < told["due_in"] <= 30
        assert 15 < told["waiting_in"] <= 20
        assert told["length_upper"] <= 4
        assert told["request_id"] != "mine"
        assert told.get("vllm_xargs", {"mine": 1}) == {"mine": 1}


@pytest.mark.parametrize(
    "bounds",
    [[], {"r": 5}, {"r": [5]}, {"r": [6, 5]}, {"r": [-1, 5]}, {"r": [1, 2.5]}, {"r": [True, 5]}, {"r": [1, 1 << 40]}],
)
def test_bad_bounds_are_refused_and_none_counts(bounds):
    with pytest.raises(HttpError) as caught:
        parse_bounds({"bounds": {"ok": [1, 2], **bounds} if isinstance(bounds, dict) else bounds})
    assert caught.value.param == "bounds"


async def test_the_newest_bounds_wait_for_the_call_under_way():
    slow, calls = asyncio.Event(), []
    backend = FakeBackend(InstanceSpec("e1", "demo"))
    backend.capabilities = replace(backend.capabilities, takes_bounds=True)

    async def tell_bounds(bounds):
        calls.append(dict(bounds))
        await slow.wait()

    backend.tell_bounds = tell_bounds
    tasks = []
    engines = BoundsTeller({"e1": backend}, lambda work: tasks.append(asyncio.ensure_future(work)), lambda: 0.0)
    for most in (60, 70, 80):
        engines.add("e1", "r1", (50, most))
        engines.send()
        await asyncio.sleep(0)
    slow.set()
    await asyncio.gather(*tasks)
    engines.send()
    await asyncio.gather(*tasks)
    assert calls == [{"r1": (50, 60)}, {"r1": (50, 80)}]
    for number in range(MOST_BOUNDS + 5):
        engines.add("e1", f"r{number}", (1, 2))
    engines.send()
    await asyncio.gather(*tasks)
    assert len(calls[-1]) == MOST_BOUNDS


@pytest.mark.parametrize(("status", "pause_s"), [(0, 5), (401, 5), (500, 5), (403, 60)])
async def test_an_engine_that_fails_is_left_alone_for_a_while_and_logged_once(caplog, status, pause_s):
    """It is down, or answers with an error, while answers run: a call every 250 ms would not help it."""
    caplog.set_level(logging.INFO, "api.openai.state.bounds_teller")
    now, calls, tasks, errors = 0.0, [], [], [EngineError("no", status=status)] * 2
    backend = FakeBackend(InstanceSpec("e1", "demo"))
    backend.capabilities = replace(backend.capabilities, takes_bounds=True)

    async def tell_bounds(bounds):
        calls.append(now)
        engines.add("e1", "r2", (1, 2))  # comes during the call
        if errors:
            raise errors.pop()

    backend.tell_bounds = tell_bounds
    engines = BoundsTeller({"e1": backend}, lambda work: tasks.append(asyncio.ensure_future(work)), lambda: now)
    while now <= 2 * pause_s:
        engines.add("e1", "r1", (1, 2))
        engines.send()
        await asyncio.gather(*tasks)
        now += 0.25
    assert calls == [0, pause_s, 2 * pause_s]
    told = [record.getMessage() for record in caplog.records]
    assert told == [
        "instance e1 was not told the bounds of 1 answers: no",
        "instance e1 takes the bounds of answers again",
    ]


@pytest.mark.parametrize("stream", [False, True])
async def test_an_engine_that_is_sent_everything_ends_what_waits_too_long(stream):
    options = ("--model", "demo", "--profile", "constant:20ms", "--max-num-seqs", "1", "--batching", "calm")
    with EngineProcess(*options) as engine:
        async with over(spec(engine)) as bed:
            body = completion(max_tokens=60, ignore_eos=True, target_ttft=50, target_tbt=5, stream=stream)
            running = bed.send({**body, "waiting_time": 60})
            await asyncio.sleep(0.3)
            answer = await bed.ask({**body, "waiting_time": 0.3, "waiting_in": 9})
            assert not running.task.done(), "its slot was taken all the time"
            assert (answer.error["code"], bed.sink.records[0].outcome) == ("waiting_time_exceeded", "expired")
            assert 0.3 <= bed.sink.records[0].e2e_s < 1.0
            step = bed.sink.records[0].decisions[-1]
            assert (step["kind"], step["figures"]["instance"]) == ("expire", "e1")
            assert (await running.done()).status == 200
            assert bed.gateway.scheduler.state_of(bed.sink.records[0].id) is State.ENDED
            assert (await bed.ask({**body, "waiting_time": 0.3})).status == 200, "what begins in time is not ended"


async def test_calm_gives_a_slot_to_who_can_still_use_it():
    """Both came in time for their first token. One needs at least 2.6 s of its 3 s, a second of which has passed when
    the slot becomes free, so it goes after the one that came later."""
    options = ("--model", "demo", "--profile", "constant:20ms", "--max-num-seqs", "1", "--max-model-len", "4096")
    with EngineProcess(*options, "--batching", "calm", "--batching-options", '{"slots": 1}') as engine:
        async with over(spec(engine)) as bed:
            body = completion(ignore_eos=True, target_ttft=3, target_tbt=5, waiting_time=60)
            running = bed.send({**body, "max_tokens": 60})
            await asyncio.sleep(0.2)
            bed.gateway.answer_lengths.take({"demo": LengthsInForce(7, forest())})
            lost = bed.send({**body, "prompt": [1] * 1900, "max_tokens": 150, "deadline": 3})
            await asyncio.sleep(0.1)
            able = bed.send({**body, "prompt": [1] * 1900, "max_tokens": 150, "deadline": 30})
            for client in (running, able, lost):
                await asyncio.wait_for(client.task, 20)
                assert client.answer.status == 200, client.answer.body
            assert [record.target_deadline_s for record in bed.sink.records] == [None, 30, 3]
