"""What holds on a CPU holds on a CUDA device: tokens, suspended steps, KV and weights that move (`make test-gpu`).

Each test runs on the CPU as well, with the other tests of the executor, so that it is known to work itself.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest
import torch

from controller.core.steps import Seq
from tests.workers.engine.torch.bench import CPU, Bench, folder, interrupted, program, prompts
from tests.workers.engine.torch.meetings import memory, met
from workers.engine.model_config import read_config
from workers.engine.torch.executor import TorchExecutor
from workers.engine.torch.kv.layout import TorchKv
from workers.engine.torch.model.cache import KVCache
from workers.engine.torch.model.transformer import Model
from workers.engine.torch.task import Boundary
from workers.engine.torch.weights.files import WeightsError
from workers.engine.torch.weights.transfer import WeightMemory

FIRST, SECOND = torch.device("cuda", 0), torch.device("cuda", 1)
on_each_device = pytest.mark.parametrize(
    "device", [pytest.param(CPU, marks=pytest.mark.torch), pytest.param(FIRST, marks=pytest.mark.gpu)], ids=str
)
between_two = pytest.mark.parametrize(
    ("here", "there"),
    [
        pytest.param(CPU, CPU, marks=pytest.mark.torch),
        pytest.param(FIRST, FIRST, marks=pytest.mark.gpu),
        pytest.param(FIRST, SECOND, marks=pytest.mark.gpu),
    ],
    ids=str,
)


@pytest.fixture(autouse=True)
def _two_devices(request):
    two = "there" in request.fixturenames and request.getfixturevalue("there") == SECOND
    if two and torch.cuda.device_count() == 1:
        pytest.skip("one CUDA device only")


def generated(device: torch.device, boundary: Boundary | None = Boundary.OPERATOR) -> dict[str, list[int]]:
    """Prompts in chunks of 16 tokens, some with a prefix that is reused."""
    bench = Bench(program(folder(), device=device), boundary=boundary)
    for number, prompt in enumerate(prompts(6)):
        bench.add(str(number), prompt)
    found = bench.run()
    bench.close()
    return found


@on_each_device
@pytest.mark.parametrize("boundary", [None, Boundary.OPERATOR, Boundary.LAYER])
def test_tokens_are_those_of_the_cpu(device, boundary):
    assert generated(device, boundary) == generated(CPU)


@on_each_device
@pytest.mark.parametrize("boundary", [Boundary.OPERATOR, Boundary.LAYER])
def test_suspended_steps_end_with_the_same_bits(device, boundary):
    tokens, bench = interrupted(folder(), prompts(6), boundary, device=device)
    assert tokens == generated(device)
    assert bench.executor.suspensions > 0


def filled(device: torch.device) -> tuple[TorchExecutor, TorchKv, Seq]:
    """A prompt's KV in the cache of an engine that is done with it."""
    made = program(folder(), device=device)
    bench = Bench(made)
    bench.add("prompt", list(range(20)), max_tokens=1)
    bench.run()
    seq = Seq("prompt", 0.0, 20, 1, token_ids=list(range(20)))
    seq.blocks = list(range(5))
    return bench.executor, TorchKv(made.cache), seq


@on_each_device
def test_kv_that_was_moved_is_what_was_computed(device):
    (one, source, seq), (other, computed_on_cpu, _) = filled(device), filled(CPU)
    target = TorchKv(program(folder(), device=device).cache)
    for layer in range(source.layers):
        piece = source.read(seq, layer, 3, 20)
        target.write(seq, layer, 3, piece)
        assert target.read(seq, layer, 3, 20) == piece
        expected = computed_on_cpu.read(seq, layer, 3, 20)
        values, wanted = (torch.frombuffer(bytearray(raw), dtype=torch.float32) for raw in (piece, expected))
        torch.testing.assert_close(values, wanted, atol=1e-4, rtol=1e-4)
        assert wanted.any()
    one.close()
    other.close()


@between_two
async def test_weights_move_from_device_to_device(here, there):
    source, target = memory(device=here), memory(present=False, device=there)
    wrong = target._memory["model.norm.weight"]
    wrong.fill_(7.0)
    async with met(timeout_s=30.0) as (gives, takes):
        taking = asyncio.create_task(asyncio.to_thread(target.receive, takes, source.manifest()))
        assert await asyncio.to_thread(source.send, gives) == await taking == source.nbytes
    assert target.manifest() == source.manifest()
    assert not (wrong == 7.0).all()


@between_two
async def test_a_source_that_goes_away_ends_the_transfer_and_the_next_one_succeeds(here, there):
    source, target = memory(device=here), memory(present=False, device=there)
    async with met(timeout_s=5.0) as (gives, takes):
        taking = asyncio.create_task(asyncio.to_thread(target.receive, takes, source.manifest()))
        await asyncio.sleep(0.2)
        await gives.close()
        with pytest.raises(WeightsError):
            await taking
    assert not target.present
    assert target.load_disk(folder()) > 0
    assert target.manifest() == source.manifest()


@pytest.mark.gpu
def test_weights_that_are_released_give_the_device_its_memory_back():
    path = folder("LlamaForCausalLM", "--hidden", "512")
    held = WeightMemory(program(path, device=FIRST).model.slots(), present=True)
    before = torch.cuda.mem_get_info(FIRST)[0]
    held.release()
    assert torch.cuda.mem_get_info(FIRST)[0] > before
    held.load_disk(path)
    assert held.present


@pytest.mark.gpu
def test_a_cache_that_is_given_up_gives_the_device_its_memory_back():
    cache = KVCache(read_config(folder()), 1 << 16, 16, FIRST, torch.float32)
    cache.memory.fill_(7.0)
    torch.cuda.synchronize(FIRST)
    before = torch.cuda.mem_get_info(FIRST)[0]
    cache.give_up()
    given = torch.cuda.mem_get_info(FIRST)[0] - before
    assert given > 0.9 * cache.nbytes
    cache.take()
    assert torch.cuda.mem_get_info(FIRST)[0] - before < 0.1 * cache.nbytes
    assert not cache.memory.any()


@pytest.mark.gpu
def test_a_model_without_room_leaves_the_device_to_others():
    """So that a warm engine starts beside one that serves."""
    config = replace(read_config(folder()), layers=16, hidden_size=1024, intermediate_size=4096)
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(FIRST)
    free, reserved = torch.cuda.mem_get_info(FIRST)[0], torch.cuda.memory_reserved(FIRST)
    slots = Model(config, FIRST, torch.float32, room=False).slots()
    size = sum(slot.memory.nbytes for slot in slots.values())
    assert free - torch.cuda.mem_get_info(FIRST)[0] < 0.05 * size
    assert torch.cuda.max_memory_reserved(FIRST) - reserved < 0.25 * size
