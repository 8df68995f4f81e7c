"""Demo traffic: its pace, its requests, and that it outlives a gateway that is away. Against a small local server."""

import asyncio
import json
import random

import pytest
from aiohttp import web

from api.openai.protocol.schemas import parse_request
from controller.core.snapshot import ModelConfig
from workers.demo_load import KINDS, DemoLoad, DemoPace, body, demo_keys, pick
from workers.supervisor.ports import free_port

PACE = DemoPace(low=1.0, high=5.0, burst=40.0)
FAST = DemoPace(low=400.0, high=400.0, burst=400.0)
KEYS = {"demo": "sk-1", "acme": "sk-2", "research": "sk-3"}


@pytest.mark.parametrize(("seconds", "rate"), [(0, 1.0), (90, 5.0), (180, 1.0), (45, 3.0)])
def test_the_wave_swings_between_low_and_high(seconds, rate):
    assert PACE.rate(seconds) == pytest.approx(rate)


def test_a_burst_comes_after_a_minute_and_again():
    assert [PACE.rate(seconds) == 40.0 for seconds in (30, 60, 74, 76, 210, 224, 226)] == [
        False, True, True, False, True, True, False,
    ]  # fmt: skip


def test_all_kinds_are_picked_about_by_their_share():
    rng = random.Random(3)
    picked = [pick(KINDS, rng) for _ in range(4000)]
    for kind in KINDS:
        assert picked.count(kind) / 4000 == pytest.approx(kind.share, abs=0.04)
    assert sum(kind.share for kind in KINDS) == pytest.approx(1.0)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.tenant)
def test_every_kind_is_a_request_the_gateway_takes(kind):
    path, content = body(kind, "demo", random.Random(1))
    parsed = parse_request(json.dumps(content).encode(), {"demo": ModelConfig("demo")}, chat="chat" in path)
    assert parsed.streamed is kind.stream


def test_keys_of_all_tenants_or_the_printed_one():
    assert demo_keys({"keys": KEYS, "api_key": "sk-0"}) == KEYS
    assert demo_keys({"api_key": "sk-0"}) == {"demo": "sk-0"}


@pytest.fixture
async def gateway():
    """Counts what it gets; `gateway.seen` are (authorization, body)."""
    app = web.Application()
    app.seen = []

    async def answer(request):
        app.seen.append((request.headers["Authorization"], await request.json()))
        return web.json_response({})

    app.router.add_post("/v1/{tail:.*}", answer)
    runner = web.AppRunner(app)
    await runner.setup()
    app.port = free_port()
    app.start = web.TCPSite(runner, "127.0.0.1", app.port).start
    yield app
    await runner.cleanup()


async def sent(load, gateway, count, within_s=10.0):
    task = asyncio.create_task(load.run())
    try:
        async with asyncio.timeout(within_s):
            while len(gateway.seen) < count:
                await asyncio.sleep(0.02)
    finally:
        task.cancel()
        await asyncio.gather(task, *load.running, return_exceptions=True)


def load_on(gateway, keys=KEYS):
    return DemoLoad(f"http://127.0.0.1:{gateway.port}", "demo", keys, KINDS, FAST, seed=1)


async def test_every_tenant_sends_with_its_own_key(gateway):
    await gateway.start()
    await sent(load_on(gateway), gateway, 60)
    assert {key for key, _ in gateway.seen} == {"Bearer sk-1", "Bearer sk-2", "Bearer sk-3"}
    assert {True, False} == {content["stream"] for _, content in gateway.seen}


async def test_only_tenants_with_a_key_send(gateway):
    await gateway.start()
    await sent(load_on(gateway, {"acme": "sk-2"}), gateway, 20)
    assert {key for key, _ in gateway.seen} == {"Bearer sk-2"}


async def test_a_gateway_that_is_away_is_waited_for(gateway):
    load = load_on(gateway)
    waiting = asyncio.create_task(sent(load, gateway, 5, within_s=20.0))
    await asyncio.sleep(0.3)
    assert load.counts["away"] < 20  # it backed off instead of trying four hundred times a second
    await gateway.start()
    await waiting
    assert gateway.seen
