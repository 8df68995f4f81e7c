"""Memory of weights and KV that is not there, comes and goes: of a cache, of a model, of an engine's rank."""

from __future__ import annotations

import asyncio
import weakref
from typing import Any

import pytest
import torch

from controller.core.steps import Seq
from tests.waiting import until_on_loop
from tests.workers.engine.torch.bench import CPU, VOCABULARY, Bench, folder, program, prompts
from workers.engine.kv.store import KvMismatch
from workers.engine.model_config import read_config
from workers.engine.torch import follower as torch_follower
from workers.engine.torch.follower import Follower
from workers.engine.torch.group import RankPart
from workers.engine.torch.kv import room as torch_room
from workers.engine.torch.kv.identity import ModelIdentity
from workers.engine.torch.kv.layout import TorchKv
from workers.engine.torch.kv.room import WithKv
from workers.engine.torch.model.cache import KVCache
from workers.engine.torch.model.transformer import Model
from workers.engine.torch.ranks import Alone
from workers.engine.torch.task import OperatorProgram
from workers.engine.torch.weights.transfer import WeightMemory
from workers.engine.weights.manager import LoadFailed, Source
from workers.engine.weights.turns import LoadTurn

pytestmark = pytest.mark.torch
DISK = Source("disk")
OUT_OF_MEMORY = "CUDA out of memory"


def cache_of(room: bool = True) -> KVCache:
    return KVCache(read_config(folder()), 8, 4, CPU, torch.float32, room=room)


def weights_held(of: OperatorProgram) -> int:
    return sum(slot.memory.untyped_storage().nbytes() for slot in of.model.slots().values())


# ---- the parts ------------------------------------------------------------------------------------------------------


def test_a_cache_that_is_given_up_holds_nothing_and_comes_back_as_zeros():
    cache = cache_of()
    shape, size, storage = cache.memory.shape, cache.nbytes, weakref.ref(cache.memory.untyped_storage())
    cache.memory.fill_(float("nan"))
    cache.give_up()
    assert storage() is None
    assert cache.memory.untyped_storage().nbytes() == cache.memory.element_size()
    assert (cache.held, cache.memory.shape, cache.nbytes) == (False, shape, size)
    cache.take()
    assert cache.memory.untyped_storage().nbytes() == size
    assert not cache.memory.any()
    cache.keys[1][3], cache.values[0][4] = 1.0, 2.0
    assert float(cache.memory.sum()) == 3 * cache.memory[0, 0, 0, 0].numel()
    assert (cache.memory[1, 0, 0, 3] == 1.0).all()


def test_taking_what_is_there_changes_nothing():
    cache = cache_of()
    cache.memory.fill_(7.0)
    cache.take()
    assert (cache.memory == 7.0).all()


def test_kv_is_neither_read_nor_written_where_there_is_no_memory():
    cache = cache_of(room=False)
    kv, seq = TorchKv(cache), Seq("s", 0.0, 4, 1)
    seq.blocks = [0]
    with pytest.raises(KvMismatch, match="the engine is asleep"):
        kv.read(seq, 0, 0, 1)
    with pytest.raises(KvMismatch, match="the engine is asleep"):
        kv.write(seq, 0, 0, bytes(kv.token_bytes))


@pytest.mark.parametrize("architecture", ["LlamaForCausalLM", "Qwen2ForCausalLM", "MixtralForCausalLM"])
def test_a_model_without_room_takes_it_with_its_weights_and_says_the_same(architecture):
    path = folder(architecture)
    whole, config = program(path), read_config(path)
    empty = OperatorProgram(
        Model(config, CPU, torch.float32, room=False), KVCache(config, 64, 4, CPU, torch.float32, room=False)
    )
    assert weights_held(empty) == 0
    memory, filled = WeightMemory(empty.model.slots(), present=False), WeightMemory(whole.model.slots(), present=True)
    memory.load_disk(path)
    empty.cache.take()
    assert weights_held(empty) == weights_held(whole)
    assert memory.manifest() == filled.manifest()
    assert told(empty) == told(whole)


def told(of: OperatorProgram) -> dict[str, list[int]]:
    bench = Bench(of)
    for number, prompt in enumerate(prompts(4)):
        bench.add(str(number), prompt)
    found = bench.run()
    bench.close()
    return found


@pytest.mark.parametrize("room", [True, False])
def test_a_model_without_room_never_takes_more_than_its_largest_part(monkeypatch, room):
    made: list[weakref.ref] = []
    most, plain = 0, torch.empty

    def counted(*sizes: int, **kind: Any) -> torch.Tensor:
        nonlocal most
        tensor = plain(*sizes, **kind)
        made.append(weakref.ref(tensor.untyped_storage()))
        most = max(most, sum(storage.nbytes() for each in made if (storage := each()) is not None))
        return tensor

    monkeypatch.setattr(torch, "empty", counted)
    model = Model(read_config(folder("LlamaForCausalLM", "--layers", "6")), CPU, torch.float32, room=room)
    layer = sum(slot.memory.nbytes for name, slot in model.slots().items() if ".layers.0." in name)
    largest = max(layer, VOCABULARY * 64 * 4)
    assert len(made) > 20
    assert (most <= largest) is not room


# ---- beside the weights ---------------------------------------------------------------------------------------------


class Weights:
    """Present or absent; the next load fails with `error`, and `seen` is whether the cache was there for it."""

    def __init__(self, cache: KVCache, present: bool = True) -> None:
        self.present, self.error, self.seen = present, "", [False][:0]
        self.nbytes, self.has_host_copy, self.shared_copy, self.sending = 10, True, False, False
        self._cache = cache

    async def load(self, source: Source, turn: LoadTurn | None = None) -> int:
        self.seen.append(self._cache.held)
        if self.error:
            raise LoadFailed(self.error)
        self.present = True
        return 10

    async def release(self, keep_host_copy: bool) -> None:
        if self.error:
            raise LoadFailed(self.error)
        self.present = False

    async def send(self, host: str, port: int, nonce: str) -> list[list[Any]]:
        return [[host, port, nonce]]


async def test_the_cache_goes_with_the_weights_and_is_there_before_them():
    cache = cache_of()
    own = Weights(cache)
    store = WithKv(own, cache, lambda: False)
    assert cache.held
    await store.release(keep_host_copy=False)
    assert (store.present, cache.held) == (False, False)
    assert await store.load(DISK) == 10
    assert (store.present, cache.held, own.seen) == (True, True, [True])
    assert (store.nbytes, store.has_host_copy, store.shared_copy, store.sending) == (10, True, False, False)
    assert await store.send("h", 1, "n") == [["h", 1, "n"]]


async def test_a_warm_engine_has_no_cache():
    cache = cache_of()
    WithKv(Weights(cache, present=False), cache, lambda: False)
    assert not cache.held


async def test_weights_that_do_not_come_leave_no_cache_and_those_that_stay_keep_it():
    cache = cache_of()
    own = Weights(cache)
    store, own.error = WithKv(own, cache, lambda: False), "no copy could be kept"
    with pytest.raises(LoadFailed, match="no copy could be kept"):
        await store.release(keep_host_copy=True)
    assert (store.present, cache.held) == (True, True)
    own.present = False
    with pytest.raises(LoadFailed):
        await store.load(DISK)
    assert (own.seen, cache.held) == ([True], False)


@pytest.mark.parametrize("error", [RuntimeError(OUT_OF_MEMORY), MemoryError(OUT_OF_MEMORY)])
async def test_without_memory_for_the_cache_nothing_is_loaded(monkeypatch, error):
    cache = cache_of(room=False)
    own = Weights(cache, present=False)
    store = WithKv(own, cache, lambda: False)
    monkeypatch.setattr(torch, "zeros", raising(error))
    with pytest.raises(LoadFailed, match=r"no memory for the KV cache of 0\.0 MB: CUDA out of memory"):
        await store.load(DISK)
    assert (own.seen, store.present, cache.held) == ([], False, False)
    monkeypatch.undo()
    await store.load(DISK)
    assert cache.held


def raising(error: Exception) -> Any:
    def zeros(*_: object, **__: object) -> None:
        raise error

    return zeros


@pytest.fixture
def looks_often(monkeypatch) -> None:
    monkeypatch.setattr(torch_room, "LOOK_S", 0.0)


async def test_a_cache_in_use_is_given_up_when_it_is_not(looks_often):
    cache, used = cache_of(), True
    store = WithKv(Weights(cache), cache, lambda: used)
    await store.release(keep_host_copy=False)
    for _ in range(20):
        await asyncio.sleep(0)
    assert cache.held
    used = False
    await until_on_loop(lambda: not cache.held)


async def test_a_load_finds_what_was_in_use_as_it_was(looks_often):
    cache, used = cache_of(), True
    store = WithKv(Weights(cache), cache, lambda: used)
    cache.memory.fill_(7.0)
    await store.release(keep_host_copy=False)
    await store.load(DISK)
    used = False
    for _ in range(20):
        await asyncio.sleep(0)
    assert (cache.memory == 7.0).all()


async def test_kv_is_of_the_weights_that_were_there_last_while_they_come_and_go():
    made = program(folder())
    own, identity = Weights(made.cache), ModelIdentity(made.model)
    store = WithKv(own, made.cache, lambda: True, identity)
    before, changed = ModelIdentity(made.model).now(), [slot.memory for slot in made.model.slots().values()]
    await store.release(keep_host_copy=False)
    changed[0].zero_()  # as a load does that then fails, or has not ended yet
    own.error = "the transfer failed"
    with pytest.raises(LoadFailed):
        await store.load(DISK)
    assert identity.now() == before
    own.error = ""
    await store.load(DISK)
    assert identity.now() == ModelIdentity(made.model).now() != before


# ---- a rank that follows --------------------------------------------------------------------------------------------


@pytest.fixture
def follower(monkeypatch) -> Follower:
    return warm_follower(monkeypatch)


def warm_follower(monkeypatch: pytest.MonkeyPatch) -> Follower:
    """One whose model is whole."""
    monkeypatch.setattr(torch_follower.dist, "TCPStore", lambda *_, **__: None)
    monkeypatch.setattr(torch_follower, "join", lambda *_: Alone())
    place: dict[str, Any] = {"device": "cpu", "dtype": "float32", "blocks": 8, "block_size": 4, "threads": 1}
    part = RankPart(1, 2, 1, folder(), read_config(folder()), **place, load=False, room=False, boundary=None)
    return Follower(part, counter=-1)


def test_the_other_ranks_hold_what_the_first_one_holds(follower):
    def held() -> tuple[bool, bool]:
        return follower._program.cache.held, weights_held(follower._program) > 0

    assert held() == (False, False)
    for kept, kind in ((False, "disk"), (True, "disk"), (False, "host")):
        follower.load(kind)
        assert held() == (True, True)
        follower.release(kept)
        assert held() == (False, False)


def test_another_rank_without_memory_for_its_cache_holds_nothing(follower, monkeypatch):
    monkeypatch.setattr(torch, "zeros", raising(RuntimeError(OUT_OF_MEMORY)))
    with pytest.raises(RuntimeError, match="out of memory"):
        follower.load("disk")
    assert (follower._program.cache.held, weights_held(follower._program)) == (False, 0)
