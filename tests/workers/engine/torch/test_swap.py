"""A real model's KV in host memory: the bytes come back, and so do the tokens."""

import asyncio

import aiohttp
import pytest
import torch

from controller.core.errors import ConfigError
from controller.engine import EngineScheduler
from controller.engine.kv_costs import KvCosts, MeasuredCosts
from controller.policies.batching import BATCHINGS
from tests.workers.engine.process import EngineProcess
from tests.workers.engine.torch.bench import CPU, Bench, engine_config, folder, hot, program, prompts
from workers.engine.config import parse
from workers.engine.server import build, with_model
from workers.engine.torch.kv.host import HostBlocks, measure_costs

pytestmark = pytest.mark.torch
OPTIONS = ("--executor", "torch", "--model", str(folder()), "--block-size", "4", "--threads", "1")
TIGHT = ("--kv-blocks", "40", "--max-model-len", "120", "--swap-bytes", "400000", "--no-enable-prefix-caching")
CHEAP = MeasuredCosts(1e-9, 1e-9, {1: 1.0})
DEVICES = [
    CPU,
    pytest.param(
        torch.device("cuda"), marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")
    ),
]


def test_bytes_come_back_to_other_blocks():
    cache = program(folder(), blocks=80).cache
    cache.memory.normal_()
    before, host = cache.memory.clone(), HostBlocks(cache, 70)
    assert host.out([(index, 69 - index) for index in range(70)]) > 0
    cache.memory.zero_()
    assert host.back([(69 - index, index + 10) for index in range(70)]) > 0
    assert torch.equal(cache.memory[:, :, 10:], before[:, :, :70])
    assert not cache.memory[:, :, :10].any()


@pytest.mark.parametrize("device", DEVICES, ids=str)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_tokens_are_those_of_a_run_without_preemption(device, temperature):
    """And nothing was computed twice: all that was evicted came back from host memory."""
    asked = prompts(6, longest=24)
    roomy, _ = served(asked, device, temperature, blocks=120)
    tight, scheduler = served(asked, device, temperature, blocks=24, swap_blocks=120)
    assert tight == roomy
    counts = scheduler.totals.swaps
    assert counts.choices["swap_cheaper"] == scheduler.totals.preemptions > 0
    assert 0 < counts.back <= counts.out
    assert scheduler.swaps.used == 0


def served(asked, device, temperature, blocks, swap_blocks=0):
    config = engine_config(blocks, max_model_len=80, swap_blocks=swap_blocks)
    scheduler = EngineScheduler(config, BATCHINGS["chunked_prefill"]())
    made = program(folder(), blocks=blocks, device=device)
    if swap_blocks:
        made.host = HostBlocks(made.cache, swap_blocks)
    scheduler.measure(KvCosts(4, CHEAP, swaps=swap_blocks > 0))
    bench = Bench(made, scheduler)
    for index, prompt in enumerate(asked):
        bench.add(str(index), prompt, 40, ignore_eos=True, seed=index, sampling=hot(temperature))
    tokens = bench.run()
    bench.close()
    return tokens, scheduler


def test_costs_are_measured_at_the_start_and_learned():
    made = program(folder(), blocks=64)
    made.host = HostBlocks(made.cache, 32)
    found = measure_costs(made, 100)
    assert found.out_s > 0
    assert found.back_s > 0
    assert set(found.prefill_s) == {8, 32}
    assert all(seconds > 0 for seconds in found.prefill_s.values())


def test_too_much_host_memory_is_refused_by_name():
    with pytest.raises(ConfigError, match="host memory") as refused:
        HostBlocks(program(folder()).cache, 1 << 30)
    assert refused.value.field == "swap_bytes"


def test_a_warm_engine_measures_itself_too_and_gives_up_what_it_took_for_it():
    config = with_model(parse(["--port", "0", *OPTIONS, *TIGHT, "--weights", "absent"]))
    assert config.costs.out_s > 0
    loop = asyncio.new_event_loop()
    _, engine, _ = build(config, loop)
    assert not config.program.cache.held
    assert engine.scheduler.swaps.room == config.engine.swap_blocks == config.program.host.blocks
    engine.close()
    loop.close()


async def test_an_engine_swaps_and_tells_what_it_chose():
    with EngineProcess(*OPTIONS, *TIGHT) as tight, EngineProcess(*OPTIONS, "--kv-blocks", "400") as roomy:
        assert await asyncio.gather(*(ask(tight, n) for n in range(4))) == [await ask(roomy, n) for n in range(4)]
        async with aiohttp.ClientSession(tight.url) as http:
            swapping = (await (await http.get("/server_info")).json())["swapping"]
            metrics = await (await http.get("/metrics")).text()
    assert sum(swapping["choices"].values()) > 0
    assert swapping["used"] == 0
    assert swapping["measured"]["block_out_s"] > 0
    assert swapping["last"]["swap_s"] > 0
    assert swapping["last"]["recompute_s"] > 0
    for reason, count in swapping["choices"].items():
        assert f'slackline_kv_evictions{{choice="{reason}"}} {float(count)}' in metrics
    assert f"slackline_kv_swapped_out_blocks {float(swapping['out'])}" in metrics


async def ask(engine, n):
    body = {"prompt": [n + 1] * 40, "max_tokens": 60, "ignore_eos": True, "temperature": 0}
    async with aiohttp.ClientSession(engine.url) as http, http.post("/v1/completions", json=body) as answer:
        assert answer.status == 200, await answer.text()
        return (await answer.json())["choices"][0]["text"]
