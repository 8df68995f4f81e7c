"""Engines on two hosts with a network between them that can go silent: no reset, no end of the stream, nothing."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress

import aiohttp
import pytest

from benchmarks.machine.network import SecondHost, network_missing, second_host
from tests.workers.engine.client import COMPLETIONS, complete, kv_has_come, kv_received, metric, post, streamed
from tests.workers.engine.process import FLEET, EngineProcess
from tests.workers.engine.torch.bench import VOCABULARY, folder

pytestmark = [
    pytest.mark.torch,
    pytest.mark.thorough,
    pytest.mark.skipif(network_missing() is not None, reason=network_missing() or ""),
]
GBIT = 0.08  # 10 MB/s
SILENT_S = 10.0  # after which nothing more comes (`wire.STALL_S`)
KV = (
    "--kv-lease",
    "8",
    "--kv-layers",
    "8",
    "--kv-token-bytes",
    "4096",
    "--no-enable-prefix-caching",
    "--max-model-len",
    "2048",
)
PROMPT = {"prompt": [7] * 1000, "ignore_eos": True}  # 33 MB of KV: three seconds on that link


@pytest.fixture(scope="module")
def network() -> Iterator[SecondHost]:
    with second_host(GBIT) as host:
        yield host


def pair(network: SecondHost, there: tuple[str, ...], here: tuple[str, ...], *both: str) -> Iterator[EngineProcess]:
    """On the second host and on this one, known to the network by their addresses there."""
    token = FLEET["token"]
    with (
        EngineProcess(*both, *there, "--host", network.there, token=token, before=network.command) as source,
        EngineProcess(*both, *here, "--host", network.here, token=token) as warm,
    ):
        yield source
        yield warm


@pytest.fixture(scope="module")
def weights(network: SecondHost) -> Iterator[dict[str, EngineProcess]]:
    """33 MB of them: more than three seconds on that link."""
    model = str(folder("LlamaForCausalLM", "--hidden", "512", "--layers", "3"))
    both = ("--executor", "torch", "--threads", "1", "--kv-cache-gib", "0.01", "--profile", "constant:5ms")
    both = (*both, "--model", model, "--served-model-name", "tiny", "--shutdown-timeout", "0")
    engines = pair(network, (), ("--weights", "absent"), *both)
    yield {"there": next(engines), "here": next(engines)}
    engines.close()


@pytest.fixture(scope="module")
def kv(network: SecondHost) -> Iterator[dict[str, EngineProcess]]:
    both = ("--profile", "constant:2ms", "--model", "demo", "--shutdown-timeout", "0", *KV, "--kv-blocks", "512")
    engines = pair(network, ("--role", "prefill"), ("--role", "decode"), *both)
    yield {"there": next(engines), "here": next(engines)}
    engines.close()


@asynccontextmanager
async def asking(engines: dict[str, EngineProcess]) -> AsyncIterator[dict[str, aiohttp.ClientSession]]:
    async with AsyncExitStack() as stack:
        yield {at: await stack.enter_async_context(aiohttp.ClientSession(each.url)) for at, each in engines.items()}


@pytest.fixture
async def over_weights(weights: dict[str, EngineProcess]) -> AsyncIterator[dict[str, aiohttp.ClientSession]]:
    async with asking(weights) as sessions:
        yield sessions


@pytest.fixture
async def over_kv(kv: dict[str, EngineProcess]) -> AsyncIterator[dict[str, aiohttp.ClientSession]]:
    async with asking(kv) as sessions:
        yield sessions


async def load(http: aiohttp.ClientSession, *sources: dict[str, str]) -> list[dict[str, object]]:
    await post(http, "/sleep?level=2", FLEET)
    status, said = await post(http, "/weights/load", {**FLEET, "sources": list(sources)})
    assert (status, said["state"]) == (200, "present"), said
    return said["attempts"]


async def test_weights_come_from_another_host_and_not_when_it_falls_silent(network, weights, over_weights):
    ask = over_weights
    source = {"kind": "engine", "url": weights["there"].url}
    (attempt,) = await load(ask["here"], source)
    whole = attempt["seconds"]
    assert whole > 2.0, "the link is not what it should be"
    same = {"prompt": [(7 * i) % VOCABULARY for i in range(40)], "max_tokens": 8, "ignore_eos": True, "temperature": 0}
    answers = [(await complete(ask[at], **same))["choices"][0]["text"] for at in ("there", "here")]
    assert answers[0] == answers[1]

    began = time.monotonic()
    loading = asyncio.create_task(load(ask["here"], source, {"kind": "disk"}))
    await asyncio.sleep(whole / 2)
    assert not loading.done()
    network.cut()
    try:
        silent, disk = await asyncio.wait_for(loading, 60.0)
    finally:
        network.mend()
    assert silent["error"], silent
    assert (disk["kind"], disk["error"]) == ("disk", "")
    assert time.monotonic() - began < whole / 2 + 3 * SILENT_S
    assert (await complete(ask["here"], **same))["choices"][0]["text"] == answers[0]

    await comes_back(ask["there"])
    (attempt,) = await load(ask["here"], source)  # the source gave up as well: it gives again
    assert attempt["error"] == ""


async def test_kv_comes_from_another_host_and_not_when_it_falls_silent(network, over_kv):
    ask = over_kv
    began = time.monotonic()
    await handed_over(ask)
    assert time.monotonic() - began > 2.0, "the link is not what it should be"

    before = await kv_received(ask["here"])
    pulling = asyncio.create_task(handed_over(ask))
    await kv_has_come(ask["here"], before + 1)
    network.cut()
    cut_at = time.monotonic()
    try:
        with pytest.raises((AssertionError, aiohttp.ClientError)) as why:
            await asyncio.wait_for(pulling, 60.0)
        assert SILENT_S - 1 < time.monotonic() - cut_at < 2 * SILENT_S, why.value
        await nothing_left(ask["here"])
    finally:
        network.mend()
    await comes_back(ask["there"])
    await nothing_left(ask["there"])
    await handed_over(ask)


async def handed_over(ask: dict[str, aiohttp.ClientSession]) -> None:
    """One request whose KV goes from there to here."""
    first = await complete(ask["there"], **PROMPT, max_tokens=1, kv_transfer_params={"do_remote_decode": True})
    offer = first["kv_transfer_params"]
    chunks = await streamed(ask["here"], COMPLETIONS, {**PROMPT, "max_tokens": 5, "kv_transfer_params": offer})
    assert chunks[-1]["choices"][0]["finish_reason"] == "length", chunks


async def comes_back(http: aiohttp.ClientSession, within_s: float = 30.0) -> None:
    ends_at = time.monotonic() + within_s
    while time.monotonic() < ends_at:
        with suppress(aiohttp.ClientError, TimeoutError):
            async with http.get("/health", timeout=aiohttp.ClientTimeout(total=2.0)) as response:
                assert response.status == 200
                return
        await asyncio.sleep(0.2)
    pytest.fail("the other host does not come back")


async def nothing_left(http: aiohttp.ClientSession, within_s: float = 40.0) -> None:
    """No block of its cache is held any more."""
    ends_at = time.monotonic() + within_s
    while await metric(http, "kv_cache_usage_perc"):
        assert time.monotonic() < ends_at, "KV is held for nobody"
        await asyncio.sleep(0.5)
