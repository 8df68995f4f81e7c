"""KV of evicted sequences in host memory at a real engine process: what clients get, aborts, a sleep, figures."""

from __future__ import annotations

import asyncio

import aiohttp
import pytest

from tests.waiting import until_on_loop
from tests.workers.engine.client import COMPLETIONS, complete, post
from tests.workers.engine.http.test_checkpoints import figure
from tests.workers.engine.process import FLEET, EngineProcess

SIZES = ("--kv-blocks", "40", "--max-model-len", "512", "--max-num-seqs", "4", "--no-enable-prefix-caching")
SWAP = ("--swap-bytes", str(40 * 16 * 32 * 4096), "--emulated-swap-bytes-per-s", "1e12")
LONG = {"prompt": [5] * 150, "max_tokens": 300, "ignore_eos": True}


@pytest.fixture(scope="module")
def engine():
    profile = ("--profile", "llama-3.1-8b-h100", "--model", "tiny")
    with EngineProcess(*profile, *SIZES, *SWAP, token=FLEET["token"]) as found:
        yield found


@pytest.fixture
async def http(engine):
    async with aiohttp.ClientSession(engine.url) as session:
        yield session


async def swapping(http):
    async with http.get("/server_info") as response:
        return (await response.json())["swapping"]


async def test_evicted_sequences_are_answered_in_full_and_counted(http):
    answers = await asyncio.gather(*(complete(http, **LONG, seed=n) for n in range(3)))
    assert [answer["usage"]["completion_tokens"] for answer in answers] == [300] * 3
    found = await swapping(http)
    assert found["choices"]["swap_cheaper"] > 0
    assert found["last"]["swap_s"] < found["last"]["recompute_s"]
    assert found["used"] == await figure(http, "kv_host_blocks_used") == 0
    assert found["blocks"] == await figure(http, "kv_host_blocks") == 40
    assert found["out"] == found["back"] == await figure(http, "kv_swapped_out_blocks") > 0


async def test_clients_that_leave_free_host_memory(http):
    asked = [asyncio.create_task(post(http, COMPLETIONS, {"model": "tiny", **LONG})) for _ in range(3)]
    await until_on_loop(lambda: figure(http, "kv_host_blocks_used"), within_s=20)
    for each in asked:
        each.cancel()
    await until_on_loop(lambda: emptied(http), within_s=20)
    assert (await swapping(http))["used"] == 0


async def emptied(http):
    return not await figure(http, "kv_host_blocks_used")


async def test_a_sleep_empties_host_memory_and_answers_go_on(http):
    asked = [asyncio.create_task(complete(http, **LONG)) for _ in range(3)]
    await until_on_loop(lambda: figure(http, "kv_host_blocks_used"), within_s=20)
    status, answer = await post(http, "/sleep?level=1&mode=keep", FLEET)
    assert status == 200, answer
    assert await figure(http, "kv_host_blocks_used") == 0
    status, answer = await post(http, "/wake_up", FLEET)
    assert status == 200, answer
    assert [answer["usage"]["completion_tokens"] for answer in await asyncio.gather(*asked)] == [300] * 3
