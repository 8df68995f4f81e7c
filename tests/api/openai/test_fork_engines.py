"""Forks over real engines whose checkpoints are lost: killed, started again, evicted. Answers stay what they were."""

from __future__ import annotations

import asyncio
import json
import signal
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import aiohttp
import pytest
from django.conf import settings

from api.openai.gateway import Gateway, GatewayOptions
from controller.core.snapshot import ModelConfig
from controller.core.types import InstanceSpec, Role
from tests.api.openai.gateways import Answer, TestBed, completion, snapshot
from tests.api.openai.servers import PATIENT
from tests.waiting import until_on_loop
from tests.workers.engine.process import EngineProcess, fleet
from workers import live
from workers.live import LiveState

pytestmark = pytest.mark.db

PROMPT = list(range(1000, 1100))
LEASE_S = 60
OPTIONS = ("--model", "demo", "--profile", "constant:10ms", "--max-model-len", "512", "--kv-blocks", "128")


@pytest.fixture(autouse=True)
def empty(redis_server, fleet_token):
    live._client(settings.REDIS_URL).flushdb()


@asynccontextmanager
async def gateway(engines: Sequence[EngineProcess]) -> AsyncIterator[TestBed]:
    """Over these engines, of a tenant whose steps are kept."""
    specs = [InstanceSpec(f"e{at}", "demo", url=each.url, backend="reference") for at, each in enumerate(engines)]
    config = replace(snapshot(()), instances=tuple(specs), models=(ModelConfig("demo", context_tokens=512),))
    async with aiohttp.ClientSession() as session:
        bed = TestBed(replace(config, tenants=(replace(config.tenants[0], retention_s=600),)))
        bed.gateway = Gateway(GatewayOptions("test", limits=PATIENT), session, bed.sink)
        board = LiveState(settings.REDIS_URL, "test")
        bed.gateway.workflows.board = bed.gateway.steps.board = bed.gateway.forks.board = board
        async with bed:
            yield bed
        await board.close()


def said(prompt: Sequence[int], **fields: Any) -> dict[str, Any]:
    usual = {"prompt": prompt, "max_tokens": 30, "ignore_eos": True, "seed": 1, "target_ttft": 20, "waiting_time": 60}
    return completion(**{**usual, **fields})


def text_of(answer: Answer) -> str:
    assert answer.status == 200, answer.body
    return json.loads(answer.body)["choices"][0]["text"]


def cached(answer: Answer) -> int:
    return json.loads(answer.body)["usage"]["prompt_tokens_details"]["cached_tokens"]


async def forked(bed: TestBed, branches: int, lease_s: float = LEASE_S) -> tuple[str, dict[str, Any]]:
    """The instance with the checkpoint, and the fork."""
    metadata = {"workflow_id": "w1", "step_key": "plan"}
    step = await bed.ask(said(PROMPT, max_tokens=2, checkpoint=lease_s, metadata=metadata))
    assert step.status == 200, step.body
    await until_on_loop(lambda: keys("at"))
    return step.headers["x-slackline-instance"], await fork(bed, branches)


async def fork(bed: TestBed, branches: int, **more: Any) -> dict[str, Any]:
    answer = await bed.ask({"step": "plan", "branches": branches, **more}, "/v1/workflows/w1/fork")
    assert answer.status in (200, 201), answer.body
    return json.loads(answer.body)


async def ended(bed: TestBed, names: Sequence[str]) -> None:
    for name in names:
        assert (await bed.ask(b"", f"/v1/workflows/w1/branches/{name}", method="DELETE")).status == 200


def keys(*kinds: str) -> list[bytes]:
    """What Redis has of checkpoints and forks."""
    found = live._client(settings.REDIS_URL).keys("answers:acme|*")
    return [key for key in found if any(b"|%s:" % kind.encode() in key for kind in kinds)]


def told_where() -> list[bytes]:
    """Of open forks, what Redis says of where their checkpoints are; nothing once they are lost."""
    client = live._client(settings.REDIS_URL)
    return [found for found in map(client.get, keys("fork")) if found.startswith(b"[")]


def reasons(bed: TestBed) -> list[str]:
    """Of the branches that ended, in their order."""
    steps = [step for record in bed.sink.records for step in record.decisions]
    return [step["reason"] for step in steps if step["kind"] == "fork"]


async def figure(engine: EngineProcess, name: str) -> float:
    async with aiohttp.ClientSession() as session, session.get(f"{engine.url}/metrics") as response:
        text = await response.text()
    return next(float(line.split()[-1]) for line in text.splitlines() if line.startswith(name))


def nothing_left(bed: TestBed) -> bool:
    """The gateway counts no request as open or at an instance, and no block as held for one."""
    lane = bed.gateway.scheduler.dispatcher.lanes["demo"]
    there = lane.instances.values()
    return not bed.gateway.runtime.requests and not any(each.outstanding or each.waiting_new for each in there)


async def test_branches_of_a_second_fork_share_the_kv_after_the_first_one_has_ended():
    with EngineProcess(*OPTIONS) as engine:
        async with gateway((engine,)) as bed:
            _, first = await forked(bed, 2)
            second = await fork(bed, 2, fork_id="again")
            asked = {name: said([*PROMPT, 5], max_tokens=8, branch=name) for name in second["branches"]}
            await ended(bed, first["branches"])
            answers = [await bed.ask(each) for each in asked.values()]
            assert [cached(each) for each in answers] == [100, 100]
            assert reasons(bed) == ["from_checkpoint"] * 2
            await ended(bed, second["branches"][:1])
            client_is_back = await fork(bed, 2, fork_id="again")
            assert (client_is_back["checkpoint"], client_is_back["open"]) == ("held", second["branches"][1:])
            assert await figure(engine, "slackline_kv_checkpoint_blocks ") > 0
            await ended(bed, client_is_back["open"])
            assert await figure(engine, "slackline_kv_checkpoint_blocks ") == 0
            assert await figure(engine, "vllm:kv_cache_usage_perc") == 0, "leaked_blocks"
            assert nothing_left(bed)
            assert keys("fork", "left", "asked", "of") == []


async def test_the_kv_of_an_abandoned_fork_ends_with_its_lease():
    """Its client never comes back, so the last branch of the other fork frees nothing."""
    with EngineProcess(*OPTIONS) as engine:
        async with gateway((engine,)) as bed:
            _, abandoned = await forked(bed, 2, lease_s=2)
            other = await fork(bed, 1)
            await ended(bed, other["branches"])
            assert await figure(engine, "slackline_kv_checkpoint_blocks ") > 0
            await asyncio.sleep(2.5)
            assert await figure(engine, "slackline_kv_checkpoint_blocks ") == 0
            assert await figure(engine, "vllm:kv_cache_usage_perc") == 0, "leaked_blocks"
            assert keys("at", "fork", "left", "asked") == []
            answer = await bed.ask(b"", f"/v1/workflows/w1/branches/{abandoned['branches'][0]}", method="DELETE")
            assert answer.status == 404


async def test_branches_of_a_killed_engine_are_computed_elsewhere_and_leave_nothing():
    """All eight are under way at the engine with the checkpoint when it is killed."""
    with EngineProcess(*OPTIONS) as first, EngineProcess(*OPTIONS) as second:
        async with gateway((first, second)) as bed:
            where, told = await forked(bed, 8)
            victim, other = (first, second) if where == "e0" else (second, first)
            branches = enumerate(told["branches"])
            asked = [said([*PROMPT, number], max_tokens=100, branch=name) for number, name in branches]
            clients = [bed.send(each) for each in asked]
            seat = bed.gateway.scheduler.dispatcher.lanes["demo"].instances[where]
            await until_on_loop(lambda: seat.outstanding == 8)
            await asyncio.sleep(0.1)
            victim.process.send_signal(signal.SIGKILL)
            answers = [await client.done() for client in clients]
            assert {answer.headers["x-slackline-instance"] for answer in answers} == {"e1" if where == "e0" else "e0"}
            assert reasons(bed) == ["from_checkpoint"] * 8
            alone = [text_of(await bed.ask({**each, "branch": "none-0"})) for each in asked]
            assert [text_of(answer) for answer in answers] == alone
            assert (await fork(bed, 2))["checkpoint"] == "lost"
            await ended(bed, told["branches"])
            assert nothing_left(bed)
            assert await figure(other, "slackline_kv_checkpoint_blocks ") == 0
            assert await figure(other, "vllm:kv_cache_usage_perc") == 0, "leaked_blocks"
            client = live._client(settings.REDIS_URL)
            assert (len(keys("fork")), len(keys("left"))) == (1, 1), "of the second fork"
            assert all(0 < client.pttl(key) <= LEASE_S * 1000 for key in keys("at", "fork", "left"))


async def test_an_engine_that_was_started_again_under_its_address_is_asked_once_and_no_more():
    with EngineProcess(*OPTIONS) as first:
        async with gateway((first,)) as bed:
            _, told = await forked(bed, 3)
            first.process.send_signal(signal.SIGKILL)
            first.process.wait()
            with EngineProcess(*OPTIONS, "--port", first.url.rpartition(":")[2]):
                for number, name in enumerate(told["branches"]):
                    text_of(await bed.ask(said([*PROMPT, number], max_tokens=2, branch=name)))
                    await until_on_loop(lambda: not told_where())
            assert reasons(bed) == ["from_checkpoint", "checkpoint_lost", "checkpoint_lost"]
            await ended(bed, told["branches"])
            assert nothing_left(bed)


async def test_branches_of_evicted_kv_are_computed_say_the_same_and_leave_no_block():
    """Answers that need all blocks as they grow take those of the checkpoint."""
    with EngineProcess(*OPTIONS) as engine:
        async with gateway((engine,)) as bed:
            _, told = await forked(bed, 3)
            asked = [said([*PROMPT, 5], max_tokens=8, branch=name) for name in told["branches"]]
            held = await bed.ask(asked[0])
            grown = (said(range(first, first + 400), max_tokens=110) for first in range(2000, 4500, 500))
            large = [bed.send({**each, "prompt": list(each["prompt"])}) for each in grown]
            for client in large:
                assert (await client.done()).status == 200
            late = [await bed.ask(each) for each in asked[1:]]
            assert (cached(held), cached(late[0])) == (100, 0)
            assert {text_of(each) for each in late} == {text_of(held)}
            assert reasons(bed)[-1] == "checkpoint_lost"
            await ended(bed, told["branches"])
            assert nothing_left(bed)
            assert await figure(engine, "slackline_kv_checkpoint_blocks ") == 0
            assert await figure(engine, "vllm:kv_cache_usage_perc") == 0, "leaked_blocks"


async def test_a_step_that_two_engines_served_pins_nothing_and_its_branches_are_computed():
    """Requests go to engines that prefill: one that decodes would hold KV that no branch can go on from."""
    options = (*OPTIONS, "--kv-layers", "1", "--kv-token-bytes", "64", "--role")
    with fleet(p=(*options, "prefill"), d=(*options, "decode")) as engines:
        async with gateway((engines["p"], engines["d"])) as bed:
            found = bed.gateway.snapshot
            roles = zip(found.instances, (Role.PREFILL, Role.DECODE), strict=True)
            instances = tuple(replace(spec, role=role) for spec, role in roles)
            bed.gateway.configure(replace(found, instances=instances, version=found.version + 1))
            await until_on_loop(lambda: bed.gateway.scheduler.disaggregated)
            where, told = await forked(bed, 2)
            assert (where, told["checkpoint"]) == ("e1", "lost")
            assert await figure(engines["d"], "slackline_kv_checkpoints_begun ") == 0
            branch = said([*PROMPT, 5], max_tokens=2, branch=told["branches"][0])
            text_of(await bed.ask(branch))
            assert reasons(bed) == ["checkpoint_lost"]
            await ended(bed, told["branches"])
