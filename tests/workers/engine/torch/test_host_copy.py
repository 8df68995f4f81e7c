"""Real weights from a copy in host memory: an engine's own, and the one that this host's engines share."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import torch

from tests.workers.engine.client import post
from tests.workers.engine.process import FLEET, EngineProcess
from tests.workers.engine.torch.bench import folder
from tests.workers.engine.torch.meetings import memory
from workers.engine.torch.weights import transfer as torch_transfer
from workers.engine.torch.weights.files import WeightsError
from workers.engine.torch.weights.store import TorchWeights
from workers.engine.torch.weights.transfer import WeightMemory
from workers.engine.weights.host_copy import WHOLE, HostCopy, home
from workers.engine.weights.manager import LoadFailed, Source
from workers.engine.weights.turns import LoadTurn

pytestmark = pytest.mark.torch
TOKEN = FLEET["token"]
ASK: dict[str, Any] = {"prompt": list(range(40)), "max_tokens": 8, "ignore_eos": True, "temperature": 0}
HOST, DISK = Source("host"), Source("disk")


def engine(base: Path, *more: str) -> EngineProcess:
    options = ("--executor", "torch", "--threads", "1", "--kv-cache-gib", "0.01", "--profile", "constant:5ms")
    named = ("--model", str(folder()), "--served-model-name", "tiny", "--shutdown-timeout", "0")
    return EngineProcess(*options, *named, "--host-copy", str(base), *more, token=TOKEN)


def store(memory: WeightMemory, base: Path) -> TorchWeights:
    return TorchWeights(memory, folder(), "127.0.0.1", TOKEN, 2.0, HostCopy(base, folder(), "float32"), model="tiny")


async def shared(weights: TorchWeights) -> Path:
    """Waits for the copy to be written."""
    async with asyncio.timeout(60):
        while weights.sending:
            await asyncio.sleep(0.01)
    assert weights._shared is not None
    path = weights._shared.whole()
    assert path is not None
    return path


def flipped(file: Path) -> None:
    """One bit of its last tensor."""
    raw = bytearray(file.read_bytes())
    raw[-1] ^= 1
    file.write_bytes(raw)


@pytest.fixture
async def session() -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=60)) as made:
        yield made


async def asked(session: aiohttp.ClientSession, url: str, **body: Any) -> tuple[int, Any]:
    return await post(session, url, {"token": TOKEN, **body})


async def state(session: aiohttp.ClientSession, of: EngineProcess) -> dict[str, Any]:
    async with session.get(f"{of.url}/weights") as response:
        return dict(await response.json())


async def text(session: aiohttp.ClientSession, of: EngineProcess) -> str:
    async with session.post(f"{of.url}/v1/completions", json={"model": "tiny", **ASK}) as response:
        return str((await response.json())["choices"][0]["text"])


async def test_when_the_serving_engine_is_gone_a_warm_one_takes_the_copy_that_it_wrote(session, tmp_path):
    source, warm = engine(tmp_path), engine(tmp_path, "--weights", "absent")
    try:
        async with asyncio.timeout(60):
            while not (await state(session, warm))["host_copy"]:
                await asyncio.sleep(0.05)
        said = await text(session, source)
        source.process.kill()
        sources = [{"kind": "engine", "url": source.url}, {"kind": "host"}, {"kind": "disk"}]
        status, loaded = await asked(session, f"{warm.url}/weights/load", sources=sources)
        assert (status, loaded["state"]) == (200, "present"), loaded
        tried = [(each["kind"], bool(each["error"])) for each in loaded["attempts"]]
        assert tried == [("engine", True), ("host", False)]
        assert loaded["attempts"][1]["bytes"] == loaded["bytes"]
        assert await text(session, warm) == said
        # A copy that others made is none of its own: level 2 stays level 2, and a wake-up may use it.
        assert (await asked(session, f"{warm.url}/sleep?level=2"))[1] == {"status": "sleeping", "level": 2}
        assert (await asked(session, f"{warm.url}/wake_up"))[0] == 200
        assert [each["kind"] for each in (await state(session, warm))["attempts"]] == ["host"]
    finally:
        source.stop()
        warm.stop()
    assert list(home(tmp_path).iterdir()) == [], "the last one took it away"


async def test_what_it_loads_is_what_the_disk_gave_bit_for_bit(tmp_path):
    first, second = store(memory(), tmp_path), store(memory(present=False), tmp_path)
    await shared(first)
    second.memory.release()
    assert await second.load(HOST) == first.nbytes
    assert second.memory.manifest() == first.memory.manifest()
    fresh = memory()
    fresh.load_disk(folder())
    assert fresh.manifest() == second.memory.manifest()


async def test_a_damaged_copy_is_refused_by_name_taken_away_and_written_again(tmp_path):
    first, second = store(memory(), tmp_path), store(memory(present=False), tmp_path)
    path = await shared(first)
    flipped(path / WHOLE)
    with pytest.raises(LoadFailed, match=r"tensor \S+ of the copy in host memory is damaged"):
        await second.load(HOST)
    assert (second.present, second.shared_copy) == (False, False)
    await second.load(DISK)
    await shared(second)
    first.memory.release()
    await first.load(HOST)
    assert first.memory.manifest() == second.memory.manifest()


async def test_a_cut_copy_is_refused(tmp_path):
    first, second = store(memory(), tmp_path), store(memory(present=False), tmp_path)
    file = await shared(first) / WHOLE
    file.write_bytes(file.read_bytes()[:-1000])
    with pytest.raises(LoadFailed, match="is not a complete safetensors file"):
        await second.load(HOST)
    assert not second.present


async def test_weights_from_another_engine_are_not_written_as_the_checkpoints(tmp_path, monkeypatch):
    """Another engine may serve an older checkpoint than the one that lies on this disk now."""
    weights = store(memory(present=False), tmp_path)

    async def received(url: str, turn: LoadTurn) -> int:
        weights.memory.load_disk(folder())  # whatever they are
        return weights.nbytes

    monkeypatch.setattr(weights, "_receive", received)
    await weights.load(Source("engine", "http://elsewhere"))
    assert (weights.present, weights.sending, weights.shared_copy) == (True, False, False)


async def test_weights_are_not_given_up_while_they_are_copied(tmp_path, monkeypatch):
    began, go_on = asyncio.Event(), asyncio.Event()
    loop, whole = asyncio.get_running_loop(), WeightMemory.entries

    def slowly(self: WeightMemory) -> Any:
        loop.call_soon_threadsafe(began.set)
        asyncio.run_coroutine_threadsafe(go_on.wait(), loop).result(30)
        return whole(self)

    monkeypatch.setattr(WeightMemory, "entries", slowly)
    weights = store(memory(), tmp_path)
    await began.wait()
    assert weights.sending
    go_on.set()
    await shared(weights)
    assert not weights.sending


@pytest.mark.parametrize("missing", ["room", "room for digests"])
async def test_a_wake_up_without_memory_keeps_its_copy_for_the_next_one(tmp_path, monkeypatch, missing):
    """Others of the device may have taken it meanwhile, and the next source finds none either."""
    weights = store(memory(), tmp_path)
    await shared(weights)
    before = weights.memory.manifest()
    await weights.release(keep_host_copy=True)

    def full(*_: object) -> None:
        raise torch.cuda.OutOfMemoryError("CUDA out of memory")

    with monkeypatch.context() as taken:
        if missing == "room":
            taken.setattr(WeightMemory, "_make_room", full)
        else:
            taken.setattr(torch_transfer, "digest", full)
        with pytest.raises(LoadFailed, match="out of memory"):
            await weights.load(HOST)
        if missing == "room":
            with pytest.raises(LoadFailed, match="out of memory"):
                await weights.load(DISK)
    assert (weights.present, weights.has_host_copy) == (False, True)
    with monkeypatch.context() as gone:
        gone.setattr(WeightMemory, "load_disk", full)
        gone.setattr(HostCopy, "whole", full)
        await weights.load(HOST)
    assert (weights.present, weights.has_host_copy) == (True, False)
    assert weights.memory.manifest() == before


async def test_a_copy_that_takes_the_room_of_the_weights_goes_before_the_disk_is_read(tmp_path, monkeypatch):
    """On a CPU both lie in one memory: without room for both, each source would fail again and again."""
    weights = store(memory(), tmp_path)
    await shared(weights)
    await weights.release(keep_host_copy=True)
    made = WeightMemory._make_room

    def room_for_one(self: WeightMemory) -> None:
        if self.has_host_copy:
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory")
        made(self)

    monkeypatch.setattr(WeightMemory, "_make_room", room_for_one)
    with pytest.raises(LoadFailed, match="can't allocate memory"):
        await weights.load(HOST)
    assert weights.has_host_copy, "the next try may find room"
    with monkeypatch.context() as gone:
        gone.setattr(weights, "_folder", tmp_path / "nothing")
        with pytest.raises(LoadFailed, match="has neither"):
            await weights.load(DISK)
    assert weights.has_host_copy, "it is given up for something"
    await weights.load(DISK)
    assert (weights.present, weights.has_host_copy) == (True, False)
    assert weights.memory.manifest() == memory().manifest()


async def test_a_copy_of_its_own_that_is_damaged_is_given_up_and_the_next_source_is_another(tmp_path):
    weights = store(memory(), tmp_path)
    await shared(weights)
    await weights.release(keep_host_copy=True)
    assert weights.memory._host is not None
    next(iter(weights.memory._host.values())).add_(1.0)
    with pytest.raises(LoadFailed, match=r"tensor \S+ of the copy in host memory is damaged"):
        await weights.load(HOST)
    assert (weights.present, weights.has_host_copy) == (False, False)
    await weights.load(HOST)  # the one that this host's engines share
    assert weights.memory.manifest() == memory().manifest()


async def test_weights_that_came_from_elsewhere_leave_no_copy_beside_them(tmp_path):
    weights = store(memory(), tmp_path)
    await shared(weights)
    await weights.release(keep_host_copy=True)
    await weights.load(DISK)
    assert (weights.present, weights.has_host_copy) == (True, False)


def test_an_engines_own_copy_is_checked_too():
    held = memory()
    before = held.manifest()
    held.keep_host_copy()
    held.release()
    assert held.load_host() == held.nbytes
    assert held.manifest() == before
    assert not held.has_host_copy, "it stays beside the weights"
    held.keep_host_copy()
    assert held._host is not None
    name, copy = next(iter(held._host.items()))
    with torch.no_grad():
        copy.add_(1.0)
    with pytest.raises(WeightsError, match=f"tensor {name} of the copy in host memory is damaged"):
        held.load_host()
    assert (held.present, held.has_host_copy) == (False, False)
