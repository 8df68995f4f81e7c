"""KV of a real model from one engine to another: the answer is the one a single engine gives, token for token."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Iterator

import aiohttp
import pytest
import torch

from controller.core.steps import Seq
from tests.workers.engine.client import COMPLETIONS, complete, samples, streamed
from tests.workers.engine.process import EngineProcess
from tests.workers.engine.torch_bench import VOCABULARY, folder, program
from workers.engine.kv_store import KvMismatch
from workers.engine.torch_kv import TorchKv

pytestmark = pytest.mark.torch


@pytest.fixture(scope="module")
def engines() -> Iterator[dict[str, EngineProcess]]:
    common = ("--executor", "torch", "--model", str(folder()), "--threads", "1", "--kv-cache-gib", "0.01")
    options = (*common, "--profile", "constant:5ms", "--shutdown-timeout", "0", "--max-num-batched-tokens", "64")
    os.environ["FLEET_TOKEN"] = "fleet-secret"
    try:
        with (
            EngineProcess(*options, "--role", "prefill") as prefill,
            EngineProcess(*options, "--role", "decode") as decode,
        ):
            yield {"prefill": prefill, "decode": decode}
    finally:
        del os.environ["FLEET_TOKEN"]


@pytest.fixture
async def http(engines: dict[str, EngineProcess]) -> AsyncIterator[dict[str, aiohttp.ClientSession]]:
    sessions = {name: aiohttp.ClientSession(engine.url) for name, engine in engines.items()}
    yield sessions
    for session in sessions.values():
        await session.close()


@pytest.mark.parametrize("sampling", [{"temperature": 0}, {"temperature": 0.8, "top_p": 0.9, "seed": 7}])
async def test_a_handed_over_answer_is_the_single_engines(http, sampling):
    body = {"prompt": [(7 * i) % VOCABULARY for i in range(150)], "ignore_eos": True, **sampling}
    before = (await samples_of(http["decode"]))["slackline_kv_received_bytes"]
    first = await complete(http["prefill"], **body, max_tokens=1, kv_transfer_params={"do_remote_decode": True})
    offer = first["kv_transfer_params"]
    chunks = await streamed(http["decode"], COMPLETIONS, {**body, "max_tokens": 20, "kv_transfer_params": offer})
    whole = await complete(http["prefill"], **body, max_tokens=20)
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == whole["choices"][0]["text"]
    # Two layers, keys and values; blocks the decode engine has cached from the turn before are not sent again.
    assert (await samples_of(http["decode"]))["slackline_kv_received_bytes"] > before


async def samples_of(session: aiohttp.ClientSession) -> dict[str, float]:
    async with session.get("/metrics") as response:
        lines = (await response.text()).splitlines()
    return {name: float(value) for name, _, value in (line.partition(" ") for line in lines if line[0] != "#")
            if name.startswith("slackline_")}  # fmt: skip


async def test_metrics_name_what_moved(http):
    seen = await samples_of(http["decode"])
    assert (seen["slackline_kv_received"], seen["slackline_kv_failed"]) == (2, 0)
    assert (await samples(http["decode"]))["vllm:num_requests_running", ""] == 0


def test_entries_written_are_the_entries_read():
    one, other = program(folder()), program(folder())
    torch.manual_seed(0)
    one.cache.memory.copy_(torch.randn_like(one.cache.memory))
    tokens = list(range(30))
    source = Seq("a", 0.0, 30, 4, token_ids=tokens, blocks=[5, 2, 9, 0, 11, 3, 1, 8])
    target = Seq("b", 0.0, 30, 4, token_ids=tokens, blocks=[0, 1, 2, 3, 4, 5, 6, 7])
    here, there = TorchKv(one.cache), TorchKv(other.cache)
    for layer in range(here.layers):
        there.write(target, layer, 0, here.read(source, layer, 0, 17))
        there.write(target, layer, 17, here.read(source, layer, 17, 30))
        assert there.read(target, layer, 0, 30) == here.read(source, layer, 0, 30)
        assert len(here.read(source, layer, 0, 1)) == here.token_bytes


def test_what_does_not_fit_is_refused():
    kv = TorchKv(program(folder()).cache)
    seq = Seq("a", 0.0, 30, 4, blocks=[0])
    with pytest.raises(KvMismatch, match="whole tokens"):
        kv.write(seq, 0, 0, b"abc")
    with pytest.raises(KvMismatch, match="blocks"):
        kv.read(seq, 0, 0, 30)
