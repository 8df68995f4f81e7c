"""Worked example C7 live: short requests, one after the other, that are due before a long one which is worth far more.

Orders by deadline or by length serve all of them first, until it is too late for the long one. CALM serves that one.
The example is tried where a gateway orders, and where a reference engine is sent everything and orders itself.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import ExitStack, asynccontextmanager
from dataclasses import replace
from typing import Any

import aiohttp
import pytest

from api.openai.gateway import Gateway, GatewayOptions
from controller.core.snapshot import ModelConfig
from controller.core.types import InstanceSpec, LatencyCoefficients
from tests.api.openai.gateways import TestBed, completion, snapshot
from tests.workers.engine.process import EngineProcess

pytestmark = pytest.mark.slow  # real seconds: what is late must be late

STEP_S = 0.01
LATENCY = LatencyCoefficients(STEP_S, 0.0, 0.0, STEP_S, 0.0, 0.0)
ORDERED_BY_GATEWAY: Mapping[str, Any] = {
    "pacing": {"name": "fixed_window", "window": 1},
    "admission": {"name": "admit_all"},
    "routing": {"name": "least_outstanding"},
    "dispatch": {"refuse_infeasible": False},
}
ORDERS = ("calm", "earliest_deadline_first", "shortest_job_first")
LONG_PROMPT = 2_000  # tokens, which its goodput counts too


@asynccontextmanager
async def over(engine: EngineProcess, overrides: Mapping[str, Any] | None = None) -> AsyncIterator[TestBed]:
    """`overrides`: the gateway orders by them; None: it sends everything at once."""
    own = {"selects": True} if overrides is None else {"max_num_seqs": 1, "latency": LATENCY}
    instance = InstanceSpec("e1", "demo", url=engine.url, backend="reference", **own)
    async with aiohttp.ClientSession() as session:
        bed = TestBed(replace(snapshot(()), instances=(instance,), models=(ModelConfig("demo", context_tokens=4096),)))
        bed.gateway = Gateway(GatewayOptions("test", "slackline", dict(overrides or {})), session, bed.sink)
        async with bed:
            yield bed


async def served(bed: TestBed, *, first: int, long: int, within_s: float, short: int, count: int) -> tuple[int, int]:
    """Goodput of the long request, and how many short ones were in time. Tokens of: what runs `first`, the `long` one,
    each `short` one, which come when the one before is about to end and are due a short while later."""
    usual = completion(ignore_eos=True, target_tbt=5, target_ttft=20, waiting_time=60)
    clients = []
    if first:
        clients.append(bed.send({**usual, "max_tokens": first}))
        await asyncio.sleep(0.1)
    worth = {"prompt": [1] * LONG_PROMPT, "max_tokens": long, "target_ttft": within_s, "deadline": within_s}
    clients.append(bed.send({**usual, **worth}))
    short_s = short * STEP_S
    for _ in range(count):
        clients.append(bed.send({**usual, "max_tokens": short, "target_ttft": 3 * short_s, "deadline": 3 * short_s}))
        await asyncio.sleep(0.9 * short_s)
    for client in clients:
        await asyncio.wait_for(client.task, 60)
    (found,) = (record for record in bed.sink.records if record.prompt_tokens == LONG_PROMPT)
    others = (record for record in bed.sink.records if record.target_deadline_s not in (None, within_s))
    return found.goodput_tokens, sum(bool(each.deadline_met) for each in others)


async def by_order(
    options: Mapping[str, Sequence[str]], overrides: Mapping[str, Mapping[str, Any]], **load: Any
) -> dict[str, tuple[int, int]]:
    """What `served` gave by order, all at once. `options`: of each order's own engine."""
    usual = ("--model", "demo", "--max-model-len", "4096", "--profile", f"constant:{STEP_S * 1000:.0f}ms")

    async def one(order: str, engine: EngineProcess) -> tuple[int, int]:
        async with over(engine, overrides.get(order)) as bed:
            return await served(bed, **load)

    with ExitStack() as engines:
        started = {name: engines.enter_context(EngineProcess(*usual, *own)) for name, own in options.items()}
        found = await asyncio.gather(*(one(name, engine) for name, engine in started.items()))
    return dict(zip(options, found, strict=True))


async def test_c7_at_a_gateway_that_orders():
    """What is sent runs to its end. A needs 3 s of 4; after the first 0.4 s come six of 0.3 s."""
    options = dict.fromkeys(ORDERS, ("--max-num-seqs", "1"))
    overrides = {order: {**ORDERED_BY_GATEWAY, "ordering": {"name": order}} for order in ORDERS}
    found = await by_order(options, overrides, first=40, long=300, within_s=4, short=30, count=6)
    check(found, LONG_PROMPT + 300)


async def test_c7_in_a_reference_engine():
    """One slot, preemptive. A needs 2 s of 2.7 and comes first, as in the example; nine of 0.2 s follow."""
    calm = {"frame_steps": 10, "token_s": STEP_S, "prefill_s": 1e-6}
    options = {
        order: (
            "--batching",
            order,
            "--batching-options",
            json.dumps({"slots": 1, **(calm if order == "calm" else {})}),
        )
        for order in ORDERS
    }
    found = await by_order(options, {}, first=0, long=200, within_s=2.7, short=20, count=9)
    check(found, LONG_PROMPT + 200)


def check(found: Mapping[str, tuple[int, int]], worth: int) -> None:
    """By order: goodput of the long request, and short ones in time."""
    assert {order: long for order, (long, _) in found.items()} == {
        "calm": worth,
        "earliest_deadline_first": 0,
        "shortest_job_first": 0,
    }, found
    assert found["calm"][1] < min(found[order][1] for order in ORDERS[1:]), found
