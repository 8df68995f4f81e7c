"""A source digests its weights at the first ask, however long that takes; no digest outlives the weights it is of."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
import torch
from aiohttp import web
from aiohttp.test_utils import TestServer

from tests.workers.engine.torch.bench import folder
from tests.workers.engine.torch.meetings import HOST, TOKEN, memory
from workers.engine.http.asgi import App
from workers.engine.http.guard import FleetGuard
from workers.engine.http.weights import WeightEndpoints
from workers.engine.torch.weights import store as torch_weight_store
from workers.engine.torch.weights import transfer as torch_transfer
from workers.engine.torch.weights.files import WeightsError
from workers.engine.torch.weights.store import TorchWeights
from workers.engine.torch.weights.transfer import WeightMemory
from workers.engine.weights.checkpoint_identity import marks_of
from workers.engine.weights.manager import LoadFailed, Source, WeightManager
from workers.http.fleet_proof import CHALLENGE_PATH

pytestmark = pytest.mark.torch
DISK = Source("disk")
digest = torch_transfer.digest


def manager(present: bool) -> WeightManager:
    path = folder()
    return WeightManager(TorchWeights(memory(present), path, HOST, TOKEN, 10.0, model="tiny", marks=marks_of(path)))


def receiver() -> WeightManager:
    made = manager(False)
    made.store.memory.release()
    return made


GUARD = FleetGuard(TOKEN)


async def _awake() -> None:
    raise AssertionError("a source loads nothing")


@asynccontextmanager
async def served(source: WeightManager, answered: Callable[[int], object]) -> AsyncIterator[str]:
    """The source's own endpoints; `answered` is told of every status."""
    app = App(WeightEndpoints(source, GUARD, _awake).routes())

    async def handle(request: web.Request) -> web.Response:
        body, said = await request.read(), []

        async def receive() -> dict[str, Any]:
            return {"type": "http.request", "body": body}

        async def send(message: Any) -> None:
            said.append(message)

        scope = {"type": "http", "method": request.method, "path": request.path, "query_string": b""}
        scope |= {"server": (request.url.host, request.url.port)}
        await app({**scope, "headers": [(name.lower(), value) for name, value in request.raw_headers]}, receive, send)
        start, end = said
        answered(start["status"])
        return web.Response(body=end["body"], status=start["status"], content_type="application/json")

    async with site(handle) as url:
        yield url


@asynccontextmanager
async def site(handle: Callable[[web.Request], Any]) -> AsyncIterator[str]:
    async def challenge(request: web.Request) -> web.Response:
        return web.json_response({"challenge": GUARD.issue()})

    app = web.Application()
    app.router.add_get(CHALLENGE_PATH, challenge)
    app.router.add_route("*", "/{path:.*}", handle)
    async with TestServer(app) as server:
        yield str(server.make_url(""))


async def test_a_source_whose_digests_take_longer_than_any_call_sends(monkeypatch):
    """One tensor's digest for each ask; a second receiver finds them all."""
    monkeypatch.setattr(torch_weight_store, "ASK_S", 1.5)
    monkeypatch.setattr(torch_weight_store, "HOLD_S", 0.1)
    source, turns, statuses, digested = manager(True), threading.Semaphore(0), [], []
    theirs = {tensor.data_ptr() for tensor in source.store.memory._memory.values()}

    def slow(tensor: torch.Tensor) -> str:
        if tensor.data_ptr() in theirs:
            assert turns.acquire(timeout=60)
            digested.append(tensor)
        return digest(tensor)

    def answered(status: int) -> None:
        statuses.append(status)
        turns.release()

    monkeypatch.setattr(torch_transfer, "digest", slow)
    async with served(source, answered) as url:
        first, second, began = receiver(), receiver(), time.monotonic()
        assert await first.load([Source("engine", url)]), first.attempts
        assert time.monotonic() - began > torch_weight_store.ASK_S
        assert set(statuses[:-1]) == {202}
        assert (statuses[-1], len(digested)) == (200, len(theirs))
        assert await second.load([Source("engine", url)]), second.attempts
        assert (statuses[-2:], len(digested)) == ([200, 200], len(theirs))
    assert first.store.memory.manifest() == second.store.memory.manifest() == memory().manifest()


async def test_a_source_is_not_put_to_sleep_while_it_digests(monkeypatch):
    """Also when nobody asks any more: its memory would be freed under the digest."""
    monkeypatch.setattr(torch_weight_store, "HOLD_S", 0.0)
    source, go = manager(True), threading.Event()
    monkeypatch.setattr(torch_transfer, "digest", lambda tensor: str(go.wait(60)) and digest(tensor))
    with pytest.raises(LoadFailed, match="0 bytes of the weights have been digested"):
        await source.store.send(HOST, 9, "nonce")
    with pytest.raises(LoadFailed, match="loaded or sent"):
        await source.release(keep_host_copy=False)
    go.set()
    async with asyncio.timeout(60):
        while source.store.sending:
            await asyncio.sleep(0.01)
    await source.release(keep_host_copy=False)
    assert not source.store.present


@pytest.mark.parametrize("error", [RuntimeError("CUDA error"), MemoryError("none left")])
async def test_digests_that_fail_are_said_and_the_next_source_is_tried(monkeypatch, error):
    source, statuses = manager(True), []

    def broken(tensor: torch.Tensor) -> str:
        raise error

    monkeypatch.setattr(torch_transfer, "digest", broken)
    async with served(source, statuses.append) as url:
        target = receiver()
        assert await target.load([Source("engine", url), DISK])
    assert statuses == [409]
    assert f"the digests of the weights could not be computed: {error}" in target.attempts[0].error
    assert not source.store.sending


async def test_a_source_that_dies_while_it_digests_is_said_to_and_the_next_one_is_tried():
    asked = []

    async def dies(request: web.Request) -> web.Response:
        asked.append(request.path)
        if len(asked) > 1:
            request.transport.abort()
        return web.json_response({"digested": 1000, "bytes": 699648}, status=202)

    async with site(dies) as url:
        target = receiver()
        assert await target.load([Source("engine", url), DISK])
    assert asked == ["/weights/send"] * 2
    assert "disappeared while it computed digests (1000 of 699648 bytes)" in target.attempts[0].error
    assert [bool(each.error) for each in target.attempts] == [True, False]


async def test_a_source_whose_digests_get_no_further_is_given_up_and_the_next_one_tried(monkeypatch):
    monkeypatch.setattr(torch_weight_store, "ASK_S", 0.5)

    async def stuck(request: web.Request) -> web.Response:
        return web.json_response({"digested": 1000, "bytes": 699648}, status=202)

    async with site(stuck) as url:
        target = receiver()
        assert await target.load([Source("engine", url), DISK])
    assert "makes no progress with the digests of its weights: 1000 of 699648 bytes" in target.attempts[0].error


# ---- never stale ----------------------------------------------------------------------------------------------------


def other() -> WeightMemory:
    """Holds weights that are not those of the disk."""
    made = memory()
    with torch.no_grad():
        for tensor in made._memory.values():
            tensor.fill_(7.0)
    return made


def test_weights_that_were_loaded_again_are_digested_again():
    held = other()
    before = held.manifest()
    held.release()
    held.load_disk(folder())
    assert held.manifest() == memory().manifest() != before


def test_digests_of_weights_that_went_meanwhile_are_those_of_nothing(monkeypatch):
    held, began, go, told = other(), threading.Event(), threading.Event(), []

    def slow(tensor: torch.Tensor) -> str:
        found = digest(tensor)
        began.set()
        assert go.wait(60)
        return found

    def ask() -> None:
        with pytest.raises(WeightsError) as caught:
            held.manifest()
        told.append(str(caught.value))

    monkeypatch.setattr(torch_transfer, "digest", slow)
    asking = threading.Thread(target=ask)
    asking.start()
    assert began.wait(60)
    held.load_disk(folder())
    go.set()
    asking.join(60)
    assert told == ["the weights were loaded again while their digests were computed"]
    assert held.manifest() == memory().manifest()
