"""One load at a time, whatever a source does; nothing is freed that somebody reads or writes."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from workers.engine.weights.manager import EmulatedWeights, Identity, LoadFailed, Source, WeightManager
from workers.engine.weights.turns import LoadTurn


class Store:
    """`does`: what each source does, by kind: an exception to raise, or bytes that come once `gate` is open."""

    def __init__(self, **does: Any) -> None:
        self.does = does
        self.present = self.sending = self.has_host_copy = False
        self.nbytes = 100
        self.identity = Identity("m")
        self.gate = asyncio.Event()
        self.gate.set()

    async def load(self, source: Source, turn: LoadTurn | None = None) -> int:
        await self.gate.wait()
        found = self.does[source.kind]
        if isinstance(found, Exception):
            raise found
        self.present = True
        return int(found)

    async def release(self, keep_host_copy: bool) -> None:
        await self.gate.wait()
        self.present, self.has_host_copy = False, keep_host_copy

    async def send(self, host: str, port: int) -> list[list[Any]]:
        raise LoadFailed("no")


@pytest.mark.parametrize("error", [LoadFailed("gone"), KeyError("tensors"), ValueError("nonsense"), OSError()])
async def test_whatever_a_source_does_is_recorded_and_the_next_one_tried(error: Exception) -> None:
    manager = WeightManager(Store(engine=error, disk=100))
    assert await manager.load([Source("engine", "http://e"), Source("disk")], "a1")
    assert [(each.kind, bool(each.error)) for each in manager.attempts] == [("engine", True), ("disk", False)]
    assert (manager.state, manager.busy, manager.order) == ("present", False, "a1")


async def test_it_knows_since_when_its_weights_are_there() -> None:
    manager = WeightManager(Store(engine=LoadFailed("gone"), disk=100))
    assert not await manager.load([Source("engine", "http://e")])
    assert manager.present_s is None
    assert await manager.load([Source("disk")])
    await asyncio.sleep(0.02)
    assert manager.present_s is not None
    assert 0.02 <= manager.present_s < 5.0
    await manager.release(keep_host_copy=False)
    assert manager.present_s is None


async def test_without_any_source_nothing_is_there() -> None:
    manager = WeightManager(Store(engine=KeyError("tensors"), disk=LoadFailed("truncated")))
    assert not await manager.load([Source("engine", "http://e"), Source("disk")])
    assert [each.error for each in manager.attempts] == ["KeyError: 'tensors'", "truncated"]
    assert (manager.state, manager.busy) == ("absent", False)


async def test_what_is_being_loaded_is_not_given_up() -> None:
    store = Store(disk=100)
    manager = WeightManager(store)
    store.gate.clear()
    load = asyncio.create_task(manager.load([Source("disk")]))
    await asyncio.sleep(0)
    assert (manager.busy, manager.state) == (True, "loading")
    with pytest.raises(LoadFailed, match="loaded or sent"):
        await manager.release(keep_host_copy=True)
    store.gate.set()
    assert await load
    assert (manager.busy, store.present) == (False, True)


async def test_what_another_engine_reads_is_not_given_up() -> None:
    store = Store()
    store.present = store.sending = True
    manager = WeightManager(store)
    with pytest.raises(LoadFailed, match="loaded or sent"):
        await manager.release(keep_host_copy=False)
    store.sending = False
    await manager.release(keep_host_copy=True)
    assert (store.present, store.has_host_copy, manager.busy) == (False, True, False)


async def test_it_is_busy_while_they_go() -> None:
    store = Store()
    store.present = True
    manager = WeightManager(store)
    store.gate.clear()
    release = asyncio.create_task(manager.release(keep_host_copy=False))
    await asyncio.sleep(0)
    assert manager.busy
    store.gate.set()
    await release
    assert not manager.busy


async def test_emulated_weights_keep_no_copy_of_nothing() -> None:
    weights = EmulatedWeights({"host": 0.0, "disk": 0.0, "engine": 0.0}, 100, present=True, model="m")
    await weights.release(keep_host_copy=True)
    assert (weights.present, weights.has_host_copy) == (False, True)
    await weights.release(keep_host_copy=True)
    assert weights.has_host_copy, "it is there still"
    await weights.release(keep_host_copy=False)
    await weights.release(keep_host_copy=True)
    assert not weights.has_host_copy
