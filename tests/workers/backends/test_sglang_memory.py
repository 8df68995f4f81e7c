"""SGLang's memory and weights: asleep, awake, read again; nothing is served from what is not whole."""

from __future__ import annotations

import asyncio

import aiohttp
import pytest

from tests.workers.backends.sglang_calls import adapter, call, collect
from tests.workers.backends.sglang_server import SglangServer
from workers.backends.base import EngineError, NotSupported


async def test_level_one_keeps_the_weights_and_shows_as_not_ready(session: aiohttp.ClientSession) -> None:
    async with SglangServer(enable_memory_saver=True, enable_weights_cpu_backup=True) as server:
        backend = adapter(server, session)
        await backend.sleep(1)
        assert (server.released, server.weights) == ({"kv_cache", "weights", "cuda_graph"}, "kept")
        assert not (await backend.telemetry(1.0)).awake
        await backend.wake()
        assert (server.weights, (await backend.telemetry(1.0)).awake) == ("good", True)
        assert "/update_weights_from_disk" not in server.asked


async def test_weights_that_nobody_kept_are_read_again_before_anything_is_served(
    session: aiohttp.ClientSession,
) -> None:
    async with SglangServer(enable_memory_saver=True) as server:
        backend = adapter(server, session)
        await backend.sleep(2)
        assert server.weights == "absent"
        await backend.wake()
        assert server.weights == "good"
        assert server.asked.index("/update_weights_from_disk") < server.asked.index("/continue_generation")


async def test_a_probe_in_its_sleep_does_not_keep_it_from_being_ready(session: aiohttp.ClientSession) -> None:
    async with SglangServer(enable_memory_saver=True, enable_weights_cpu_backup=True) as server:
        backend = adapter(server, session)
        await backend.sleep(1)
        async with session.get(f"{server.url}/health") as probe:
            assert probe.status == 503
        await backend.wake()
        assert await backend.ready()


@pytest.mark.parametrize(
    ("options", "level", "field"),
    [
        ({}, 1, "enable_memory_saver"),
        ({"enable_memory_saver": True}, 1, "enable_weights_cpu_backup"),
        ({"enable_memory_saver": True, "enable_weights_cpu_backup": True}, 2, "enable_weights_cpu_backup"),
    ],
)
async def test_a_sleep_it_was_not_started_for_is_refused_by_name(
    session: aiohttp.ClientSession, options: dict[str, bool], level: int, field: str
) -> None:
    async with SglangServer(**options) as server:
        with pytest.raises(NotSupported, match=r"SGLang cannot .* because") as caught:
            await adapter(server, session).sleep(level)
        assert (caught.value.field, server.asked) == (field, [])


async def test_memory_is_never_released_under_a_running_request(session: aiohttp.ClientSession) -> None:
    """The real one would assert and die."""
    async with SglangServer(enable_memory_saver=True) as server:
        server.hold.clear()
        backend = adapter(server, session)
        task = asyncio.create_task(collect(backend, call()))
        while not server.jobs:
            await asyncio.sleep(0.005)
        with pytest.raises(EngineError, match="num_running_reqs 1") as caught:
            await backend.sleep(2)
        assert (caught.value.status, server.asked) == (409, [])
        server.hold.set()
        assert await task


async def test_weights_that_cannot_be_read_again_serve_nobody(session: aiohttp.ClientSession) -> None:
    async with SglangServer(enable_memory_saver=True) as server:
        backend = adapter(server, session)
        await backend.sleep(2)
        server.disk = "/elsewhere"
        with pytest.raises(EngineError, match="answered 400") as caught:
            await backend.wake()
        assert b"no model at /models/demo" in caught.value.body
        assert not await backend.ready()
        server.disk = "/models/demo"
        await backend.wake()
        assert (server.weights, await backend.ready()) == ("good", True)
