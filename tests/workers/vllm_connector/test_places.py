"""Who loads next when a peer is asked for more than may move at a time."""

from __future__ import annotations

import asyncio

import pytest

from tests.workers.flowd.running import turns
from workers.vllm_connector.places import Places


class Loads:
    """Each goes on until it is told to end. `began`: their names, in order."""

    def __init__(self, most: int) -> None:
        self.places, self.began = Places(most), list[str]()
        self._go_on: dict[str, asyncio.Event] = {}

    def start(self, name: str, due: float | None = None) -> asyncio.Task[None]:
        self._go_on[name] = asyncio.Event()
        return asyncio.create_task(self._load(name, due))

    async def _load(self, name: str, due: float | None) -> None:
        async with self.places.place(due):
            self.began.append(name)
            await self._go_on[name].wait()

    async def end(self, name: str) -> None:
        self._go_on[name].set()
        await turns()


async def test_the_load_that_is_due_first_comes_next() -> None:
    loads = Loads(1)
    for name, due in (("first", 9.0), ("whenever", None), ("late", 8.0), ("soon", 2.0)):
        loads.start(name, due)
        await turns()
    assert loads.began == ["first"]
    for name in ("first", "soon", "late", "whenever"):
        await loads.end(name)
    assert loads.began == ["first", "soon", "late", "whenever"]


@pytest.mark.parametrize("at", ["waiting", "called"])
async def test_a_load_that_is_cancelled_keeps_no_place(at: str) -> None:
    loads = Loads(1)
    loads.start("first")
    await turns()
    cancelled = loads.start("cancelled")
    await turns()
    if at == "waiting":
        cancelled.cancel()
        await turns()
        await loads.end("first")
    else:  # it was told of its place, and has not run since
        loads._go_on["first"].set()
        while loads.places._waiting:
            await asyncio.sleep(0)
        cancelled.cancel()
        await turns()
    loads.start("next")
    await turns()
    assert loads.began == ["first", "next"]
    assert cancelled.cancelled()


async def test_a_place_that_was_given_up_twice_is_one_place() -> None:
    loads = Loads(1)
    async with loads.places.place(None) as leave:
        leave()
        leave()
        loads.start("first")
        loads.start("second")
        await turns()
        assert loads.began == ["first"]
    await turns()
    assert loads.began == ["first"], "the end of a load that has left frees nothing"
    await loads.end("first")
    assert loads.began == ["first", "second"]
    await loads.end("second")
