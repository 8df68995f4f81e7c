"""The engine's way to a device, walked on emulated ones: nothing is mixed, and nothing is out of order, as far as
`torch_two_devices` sees it. No line here says that anything ran on CUDA."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from controller.core.steps import Chunk, Seq, Step, StepDone
from tests.workers.engine.process import FLEET
from tests.workers.engine.torch.bench import CPU, Bench, folder, hot, interrupted, program, prompts
from tests.workers.engine.torch.meetings import memory, met
from tests.workers.engine.torch.test_cuda import filled, generated
from tests.workers.engine.torch.test_sleep import Whole, configured
from tests.workers.engine.torch.two_devices import DEVICES, FIRST, SECOND, EmulatedNccl, EmulatedTensor, emulated
from workers.engine.model_config import FAMILIES, read_config
from workers.engine.torch.kv.identity import ModelIdentity
from workers.engine.torch.kv.layout import TorchKv
from workers.engine.torch.model.batch import segments_of
from workers.engine.torch.model.cache import KVCache
from workers.engine.torch.model.transformer import Model
from workers.engine.torch.ranks import Alone
from workers.engine.torch.serving import measure
from workers.engine.torch.task import Boundary, OperatorProgram, StepTask
from workers.engine.torch.weights.files import load_weights
from workers.engine.torch.weights.host_group import HostGroup
from workers.engine.torch.weights.transfer import WeightMemory, reserve
from workers.engine.weights.host_copy import WHOLE, HostCopy

pytestmark = [
    pytest.mark.torch,
    pytest.mark.thorough,
    pytest.mark.skipif(torch.backends.cuda.is_built(), reason="a build for CUDA: test_cuda is for that"),
]
on_each = pytest.mark.parametrize("device", DEVICES, ids=str)


@pytest.fixture(autouse=True)
def _emulated() -> Iterator[None]:
    with emulated():
        yield


# ---- steps ----------------------------------------------------------------------------------------------------------


@on_each
@pytest.mark.parametrize("boundary", [None, Boundary.OPERATOR, Boundary.LAYER])
def test_chunks_batches_and_reused_prefixes_give_the_tokens_of_the_cpu(device, boundary):
    assert generated(device, boundary) == generated(CPU)


@on_each
@pytest.mark.parametrize("architecture", sorted(FAMILIES))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_every_model_draws_the_same_tokens(device, architecture, dtype):
    """With seeds and bans, so that all of sampling is in it."""

    def run(place: torch.device) -> dict[str, list[int]]:
        config = read_config(folder(architecture))
        model = Model(config, place, dtype)
        load_weights(model.slots(), folder(architecture))
        made = OperatorProgram(model, KVCache(config, 64, 4, place, dtype))
        bench = Bench(made)
        for number, prompt in enumerate(prompts(4)):
            sampling = hot(0.9, 50, 0.95) if number % 2 else hot(0.0)
            bench.add(str(number), prompt, seed=number, sampling=sampling, min_tokens=4, stop_tokens=(3, 5))
        found = bench.run()
        bench.close()
        return found

    assert run(device) == run(CPU)


class OnSecond(Alone):
    """A rank on the second device. What it would have from others it makes up."""

    rank, world = 1, 2


@on_each
@pytest.mark.parametrize("boundary", [Boundary.OPERATOR, Boundary.LAYER])
def test_suspended_steps_end_with_the_same_tokens(device, boundary):
    tokens, bench = interrupted(folder(), prompts(6), boundary, device=device)
    assert tokens == generated(CPU)
    assert bench.executor.suspensions > 0


@pytest.mark.parametrize("architecture", ["LlamaForCausalLM", "MixtralForCausalLM"])
def test_all_that_a_rank_computes_is_on_its_own_device(architecture):
    made = program(folder(architecture), ranks=OnSecond(), device=SECOND)
    seq = Seq("prompt", 0.0, 20, 1, token_ids=list(range(20)), blocks=list(range(5)))
    task = StepTask(1, made, segments_of(Step(1, (Chunk(seq, 0, 10, False), Chunk(seq, 10, 10, True)), (), 0)))
    with torch.inference_mode():
        for _ in range(task.length - 1):
            task.advance()
            held = [getattr(task._pass, name) for name in ("tokens", "positions", "slots", "cos", "hidden", "query")]
            assert {each.device for each in held if each.numel()} == {SECOND}
        task.advance()
    assert task.over
    assert task.layers_done == made.model.config.layers


def test_steps_are_timed_on_a_device():
    assert measure(program(folder(), 512, device=FIRST), "tiny", 512).coefficients


# ---- KV -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("here", "there"), [(FIRST, SECOND), (SECOND, FIRST), (FIRST, CPU), (CPU, SECOND)], ids=str)
def test_kv_moves_from_any_device_to_any_other(here, there):
    (one, source, seq), (other, wanted, _) = filled(here), filled(CPU)
    target = TorchKv(program(folder(), device=there).cache)
    for layer in range(source.layers):
        piece = source.read(seq, layer, 3, 20)
        assert piece == wanted.read(seq, layer, 3, 20)
        target.write(seq, layer, 3, piece)
        assert target.read(seq, layer, 3, 20) == piece
    one.close()
    other.close()


@on_each
@pytest.mark.parametrize("boundary", [None, Boundary.OPERATOR])
def test_kv_of_a_chunk_is_read_when_its_step_has_ended(device, boundary):
    """Nothing was sampled, so nothing but the pool has waited for the device."""
    bench = Bench(program(folder(), device=device), boundary=boundary)
    seq = Seq("prompt", 0.0, 20, 1, token_ids=list(range(20)), blocks=list(range(5)))
    bench.executor.start(Step(1, (Chunk(seq, 0, 16, False),), (), 0))
    bench.next_event()
    _, wanted, _ = filled(CPU)
    assert TorchKv(bench.executor._program.cache).read(seq, 0, 0, 16) == wanted.read(seq, 0, 0, 16)
    bench.close()


@on_each
def test_a_prompt_goes_on_from_kv_that_came(device):
    """What is written beside the steps is there for the next of them."""
    (one, source, seq), wanted = filled(CPU), generated_from(CPU, 0)
    bench = Bench(program(folder(), device=device))
    target = TorchKv(bench.executor._program.cache)
    for layer in range(source.layers):
        target.write(seq, layer, 0, source.read(seq, layer, 0, 16))
    assert generated_from(device, 16, bench) == wanted
    one.close()


def generated_from(device: torch.device, start: int, bench: Bench | None = None) -> int:
    """The token behind the prompt of `filled`."""
    bench = bench or Bench(program(folder(), device=device))
    seq = Seq("prompt", 0.0, 20, 1, token_ids=list(range(20)), blocks=list(range(5)))
    bench.executor.start(Step(1, (Chunk(seq, start, 20 - start, True),), (), 0))
    done = bench.next_event()
    bench.close()
    assert isinstance(done, StepDone)
    return done.sampled[0].token


@on_each
def test_a_layer_is_read_while_the_step_goes_on(device):
    made = program(folder(), device=device)
    seq = Seq("prompt", 0.0, 20, 1, token_ids=list(range(20)), blocks=list(range(5)))
    task = StepTask(1, made, segments_of(Step(1, (Chunk(seq, 0, 20, True),), (), 0)))
    store, (_, wanted, _) = TorchKv(made.cache), filled(CPU)
    with torch.inference_mode():
        while task.layers_done < 1:
            task.advance()
        task.advance()
    assert store.read(seq, 0, 0, 20) == wanted.read(seq, 0, 0, 20)


@on_each
def test_one_model_is_known_as_the_same_wherever_it_lies(device):
    assert ModelIdentity(program(folder(), device=device).model).now() == ModelIdentity(program(folder()).model).now()


# ---- weights --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("here", "there"), [(FIRST, SECOND), (SECOND, FIRST), (SECOND, SECOND)], ids=str)
async def test_weights_move_from_device_to_device(here, there):
    """Into memory that was only just touched, in the steps' line. NCCL joins no two processes on one device."""
    source, slots = memory(device=here), Model(read_config(folder()), there, torch.float32).slots()
    target = WeightMemory(slots, present=False, keep_room=True)
    reserve(slots)
    async with met(timeout_s=30.0) as (gives, takes):
        made, ways = takes._made, list[type]()
        takes._made = lambda rank, device: ways.append(type(group := made(rank, device))) or group
        taking = asyncio.create_task(asyncio.to_thread(target.receive, takes, source.manifest()))
        assert await asyncio.to_thread(source.send, gives) == await taking == source.nbytes
    assert target.manifest() == source.manifest()
    assert contents(target) == contents(memory())
    assert ways == [HostGroup if here == there else EmulatedNccl]


def contents(held: WeightMemory) -> list[bytes]:
    return [bytes(block) for block in held.blocks()]


@on_each
def test_weights_come_back_from_host_memory_and_from_disk(device):
    held, wanted = memory(device=device), contents(memory())
    for load in (held.load_host, lambda: held.load_disk(folder())):
        held.keep_host_copy()
        held.release()
        assert load() > 0
        assert contents(held) == wanted


@on_each
def test_what_is_copied_or_digested_is_what_the_steps_line_wrote_last(device):
    held, wanted = memory(device=device), memory()
    for each in (held, wanted):
        for tensor in each._memory.values():
            tensor.mul_(2)
    assert contents(held) == contents(wanted)
    for tensor in held._memory.values():
        tensor.mul_(1)
    assert held.entries()[0].digest
    for tensor in held._memory.values():
        tensor.mul_(1)
    held.keep_host_copy()


@on_each
@pytest.mark.parametrize("written_by", [CPU, FIRST], ids=str)
def test_a_shared_copy_is_read_whoever_wrote_it(device, written_by, tmp_path):
    shared = HostCopy(tmp_path, folder(), "float32")
    source = memory(device=written_by)
    assert shared.write(shared.at_start, source.entries(), source.blocks())
    path = shared.whole()
    assert path is not None
    assert (path / WHOLE).is_file()
    held = memory(present=False, device=device)
    held.release()
    held.load_host(path)
    assert contents(held) == contents(source)
    assert held.manifest() == memory(device=device).manifest()


@on_each
def test_room_is_made_where_the_weights_will_lie(device):
    config = replace(read_config(folder()), layers=3)
    slots = Model(config, device, torch.float32, room=False).slots()
    assert {slot.memory.untyped_storage().nbytes() for slot in slots.values()} == {0}
    slots = Model(config, device, torch.float32).slots()
    reserve(slots)
    assert not any(slot.memory.any() for slot in slots.values())


# ---- a whole engine -------------------------------------------------------------------------------------------------


@pytest.fixture
async def whole_engines(fleet_token) -> Any:
    """As the server wires them: on the first device, and on the CPU."""
    found = [Whole(configured("--device", device, "--scheduler", "slackline")) for device in ("cuda", "cpu")]
    yield found
    for each in found:
        each.close()


async def test_an_engine_says_the_same_asleep_and_awake_again(whole_engines):
    emulated, plain = whole_engines
    assert isinstance(emulated.config.program.cache.memory, EmulatedTensor)
    wanted, _ = await plain.says()
    for level in (1, 2):
        assert (await emulated.says())[0] == wanted
        assert (await emulated.post("/sleep", f"level={level}", **FLEET))[0] == 200
        assert emulated.held == (False, False)
        assert (await emulated.post("/wake_up", **FLEET))[0] == 200
    assert (await emulated.says())[0] == wanted
