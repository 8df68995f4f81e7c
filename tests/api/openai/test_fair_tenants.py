"""A tenant that asks for four times its share, at a real gateway with real engine processes."""

from __future__ import annotations

import asyncio
import json
import random
from dataclasses import replace

import aiohttp
import pytest

from api.openai.gateway import Gateway, GatewayOptions
from controller.core.snapshot import ModelConfig, TenantConfig
from controller.core.types import InstanceSpec, LatencyCoefficients
from controller.predict.answer_lengths import LengthsInForce
from tests.api.openai.gateways import TestBed, completion, key_config, snapshot
from tests.controller.predict.test_answer_lengths import forest
from tests.workers.engine.process import EngineProcess

TENANTS = ("a", "b", "eager", "best")
TOKENS, PER_S, SECONDS = 20, 4.8, 5.0
USUAL, EAGER, NONE = {"target_ttft": 0.3, "target_tbt": 0.03}, {"target_ttft": 0.01, "target_tbt": 0.5}, {}


def engine(fair_weight: float) -> EngineProcess:
    """Of four requests at a time, which take 0.2 s: under twenty a second."""
    options = {"slots": 4, "frame_steps": 10, "token_s": 0.01, "prefill_s": 1e-6, "fair_weight": fair_weight}
    sizes = ("--model", "demo", "--profile", "constant:10ms", "--max-num-seqs", "64", "--max-model-len", "4096")
    return EngineProcess(*sizes, "--batching", "calm", "--batching-options", json.dumps(options))


async def served(url: str, eager: dict[str, float], times: float) -> dict[str, int]:
    """Tokens on time by tenant, and `ended`: requests without targets that ended. `eager`: its targets; it asks
    `times` as often as the others."""
    config = snapshot(
        (),
        tenants=tuple(TenantConfig(index, name, "chat") for index, name in enumerate(TENANTS)),
        keys=tuple(key_config(f"sk-{name}", id=index, tenant=name) for index, name in enumerate(TENANTS)),
        models=(ModelConfig("demo", context_tokens=4096),),
    )
    config = replace(config, instances=(InstanceSpec("e1", "demo", url=url, backend="reference", selects=True),))
    async with aiohttp.ClientSession() as session:
        bed = TestBed(config)
        bed.gateway = Gateway(GatewayOptions("test"), session, bed.sink)
        async with bed:
            bed.gateway.answer_lengths.take({"demo": LengthsInForce(7, forest())})
            asked = (("a", PER_S, USUAL), ("b", PER_S, USUAL), ("eager", PER_S * times, eager), ("best", 0.8, NONE))
            await asyncio.gather(*(ask(bed, *each) for each in asked))
        found = dict.fromkeys((*TENANTS, "ended"), 0)
        for record in bed.sink.records:
            found[record.tenant] += record.goodput_tokens
            found["ended"] += record.tenant == "best" and record.output_tokens == TOKENS
        return found


async def ask(bed: TestBed, tenant: str, per_s: float, targets: dict[str, float]) -> None:
    """Requests at random times, and wait for all of them."""
    rng, clients = random.Random(tenant), []
    loop = asyncio.get_running_loop()
    began = at = loop.time()
    while (at := at + rng.expovariate(per_s)) < began + SECONDS:
        await asyncio.sleep(max(0.0, at - loop.time()))
        body = completion(prompt=[1] * 200, max_tokens=TOKENS, ignore_eos=True, stream=True, waiting_time=60, **targets)
        clients.append(bed.send(body, key=f"sk-{tenant}"))
    for client in clients:
        await asyncio.wait_for(client.task, 60)


@pytest.mark.slow
async def test_others_keep_their_goodput_beside_an_eager_tenant():
    with engine(0.5) as fair, engine(0.0) as unfair:
        before = await served(fair.url, USUAL, 1)
        kept = await served(fair.url, EAGER, 4)
        lost = await served(unfair.url, EAGER, 4)
    assert all(kept[tenant] >= 0.9 * before[tenant] > 0 for tenant in ("a", "b")), (before, kept, lost)
    assert lost["a"] + lost["b"] < 0.9 * (before["a"] + before["b"]), (before, kept, lost)
    assert kept["ended"] == before["ended"] > 0


GREEDY, OTHER = 16, 6  # requests; one of `greedy` is worth three times as much for its time


async def sent_first(engine: EngineProcess, fair_weight: float) -> list[str]:
    """Tenants by the order in which a gateway that ranks by `calm` sent their requests to an engine with one slot."""
    tenants = ("greedy", "other")
    config = snapshot(
        (),
        tenants=tuple(TenantConfig(index, name, "chat") for index, name in enumerate(tenants)),
        keys=tuple(key_config(f"sk-{name}", id=index, tenant=name) for index, name in enumerate(tenants)),
        models=(ModelConfig("demo", context_tokens=4096),),
    )
    latency = LatencyCoefficients(0.005, 0.0, 0.0, 0.005, 0.0, 0.0)
    only = InstanceSpec("e1", "demo", url=engine.url, backend="reference", max_num_seqs=1, latency=latency)
    overrides = {
        "ordering": {"name": "calm", "fair_weight": fair_weight, "frame_steps": 5, "adapt": False},
        "pacing": {"name": "fixed_window", "window": 1},
        "admission": {"name": "admit_all"},
        "routing": {"name": "least_outstanding"},
        "dispatch": {"refuse_infeasible": False},
    }
    async with aiohttp.ClientSession() as session:
        bed = TestBed(replace(config, instances=(only,)))
        bed.gateway = Gateway(GatewayOptions("test", "slackline", overrides), session, bed.sink)
        async with bed:
            usual = {"ignore_eos": True, "target_ttft": 30, "target_tbt": 10, "deadline": 60, "waiting_time": 60}
            clients = []
            for tenant, count, tokens in (("greedy", GREEDY, 20), ("other", OTHER, 60)):
                body = completion(prompt=[1] * 400, max_tokens=tokens, **usual)
                clients += [bed.send(body, key=f"sk-{tenant}") for _ in range(count)]
            for client in clients:
                await asyncio.wait_for(client.task, 60)
                assert client.answer.status == 200, client.answer.body
        return [each.tenant for each in sorted(bed.sink.records, key=lambda each: each.arrived_at + each.queue_s)]


async def test_a_gateway_that_is_fair_sends_the_other_tenant_before_the_greedy_one_is_done():
    """Without `fair_weight` what is worth the most goes first: all that the greedy tenant has."""
    options = ("--model", "demo", "--profile", "constant:5ms", "--max-num-seqs", "1", "--max-model-len", "4096")
    with EngineProcess(*options) as only:
        unfair, fair = await sent_first(only, 0.0), await sent_first(only, 0.5)
    assert unfair == ["greedy"] * GREEDY + ["other"] * OTHER
    assert fair[: GREEDY // 2].count("other") >= 2, fair
