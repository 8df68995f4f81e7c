"""The SGLang adapter against the contract fake: what is sent, what is understood, what is refused and why."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Any

import aiohttp
import orjson
import pytest

from controller.core.types import InstanceSpec, Role
from tests.workers.backends.sglang_server import SglangServer
from workers.backends.base import Chunk, EngineError, Limits, NotSupported, RoleRefused, UpstreamCall, WeightSource
from workers.backends.registry import backend_for
from workers.backends.sglang import SglangBackend

LIMITS = Limits(control_s=5.0)


@pytest.fixture
async def session() -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession(auto_decompress=False) as session:
        yield session


def adapter(server: SglangServer, session: aiohttp.ClientSession) -> SglangBackend:
    backend = backend_for(InstanceSpec("s1", "demo", url=server.url, backend="sglang"), session, LIMITS)
    assert isinstance(backend, SglangBackend)
    return backend


def call(streamed: bool = True, offer: bytes = b"", path: str = "/v1/completions", **fields: Any) -> UpstreamCall:
    body: dict[str, Any] = {"model": "demo", "prompt": [1, 2, 3], "max_tokens": 4, "stream": streamed, **fields}
    if streamed:
        body["stream_options"] = {"include_usage": True}
    return UpstreamCall("req-1", path, orjson.dumps(body)[:-1], 42, streamed, False, offer)


async def collect(backend: SglangBackend, upstream: UpstreamCall) -> list[Chunk]:
    return [chunk async for chunk in backend.generate(upstream)]


# ---- requests -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
async def test_a_stream_is_counted_and_its_usage_dropped(session: aiohttp.ClientSession, path: str) -> None:
    async with SglangServer() as server:
        chunks = await collect(adapter(server, session), call(path=path))
        assert (chunks[0].kind, sum(chunk.tokens for chunk in chunks)) == ("accepted", 4)
        assert [tuple(chunk.usage) for chunk in chunks if chunk.usage] == [(3, 4)]
        assert b"usage" not in b"".join(chunk.raw for chunk in chunks)
        assert chunks[-1].done


async def test_a_whole_answer_comes_as_one_body(session: aiohttp.ClientSession) -> None:
    async with SglangServer() as server:
        accepted, body = await collect(adapter(server, session), call(streamed=False))
        assert (accepted.kind, body.kind, body.usage) == ("accepted", "body", (3, 4))


@pytest.mark.parametrize(
    ("options", "sent"),
    [
        ({"enable_priority_scheduling": True}, -42),
        ({"enable_priority_scheduling": True, "schedule_low_priority_values_first": True}, 42),
        ({"abort_on_priority_when_disabled": True}, None),
    ],
)
async def test_urgency_is_told_the_way_the_server_orders(
    session: aiohttp.ClientSession, options: dict[str, bool], sent: int | None
) -> None:
    async with SglangServer(**options) as server:
        await collect(adapter(server, session), call())
        assert server.bodies[0].get("priority") == sent


async def test_each_call_has_an_id_of_its_own(session: aiohttp.ClientSession) -> None:
    """A retry at the same server while the former is still being aborted: SGLang refuses an id it has."""
    async with SglangServer() as server:
        backend = adapter(server, session)
        for _ in range(3):
            await collect(backend, call())
        rids = [body["rid"] for body in server.bodies]
        assert len(set(rids)) == 3
        assert not any(a is not b and b.startswith(a) for a in rids for b in rids)


async def test_abort_reaches_the_server_by_id(session: aiohttp.ClientSession) -> None:
    async with SglangServer() as server:
        server.hold.clear()
        backend = adapter(server, session)
        task = asyncio.create_task(collect(backend, call(streamed=False)))
        while not server.jobs:
            await asyncio.sleep(0.005)
        await backend.abort("req-1")
        with pytest.raises(EngineError):
            await task
        assert server.aborted == [server.bodies[0]["rid"]]
        await backend.abort("req-1")


async def test_what_is_closed_before_its_end_is_aborted_by_id_too(session: aiohttp.ClientSession) -> None:
    async with SglangServer() as server:
        server.pace_s = 0.05
        backend = adapter(server, session)
        async with aclosing(backend.generate(call(max_tokens=1000))) as chunks:
            async for chunk in chunks:
                if chunk.tokens:
                    break
        async with asyncio.timeout(5):
            while server.jobs:
                await asyncio.sleep(0.005)
        assert server.aborted == [server.bodies[0]["rid"]]


async def test_an_answer_that_the_engine_aborted_is_no_answer(session: aiohttp.ClientSession) -> None:
    async with SglangServer() as server:
        server.pace_s = 0.02
        backend = adapter(server, session)

        async def read() -> None:
            async for chunk in backend.generate(call(max_tokens=1000)):
                if chunk.tokens:
                    for job in server.jobs.values():
                        job.gone.set()

        with pytest.raises(EngineError, match="aborted") as caught:
            await read()
        assert caught.value.status == 503


async def test_errors_get_openais_shape_and_keep_their_status(session: aiohttp.ClientSession) -> None:
    async with SglangServer(disaggregation_mode="prefill") as server:
        with pytest.raises(EngineError) as caught:
            await collect(adapter(server, session), call())
        assert (caught.value.status, caught.value.client_fault) == (400, True)
        assert "bootstrap_room" in orjson.loads(caught.value.body)["error"]["message"]


async def test_nobody_listening_is_unreachable(session: aiohttp.ClientSession) -> None:
    async with SglangServer() as server:
        backend = adapter(server, session)
        await collect(backend, call())
        await server.die()
        with pytest.raises(EngineError) as caught:
            await collect(backend, call())
        assert caught.value.unreachable
        assert not await backend.ready()


# ---- telemetry ------------------------------------------------------------------------------------------------------


async def test_telemetry_reads_loads_readiness_and_totals(session: aiohttp.ClientSession) -> None:
    async with SglangServer(enable_metrics=True) as server:
        server.hold.clear()
        backend = adapter(server, session)
        task = asyncio.create_task(collect(backend, call()))
        while not server.jobs:
            await asyncio.sleep(0.005)
        load = await backend.telemetry(7.0)
        assert (load.observed_at, load.running, load.waiting, load.kv_usage) == (7.0, 1, 0, 0.25)
        assert (load.kv_capacity_tokens, load.max_num_seqs, load.awake) == (4096, 8, True)
        assert (load.prompt_tokens_total, load.generation_tokens_total) == (42, 7)
        server.hold.set()
        await task


async def test_what_waits_for_a_peer_counts_as_waiting(session: aiohttp.ClientSession) -> None:
    async with SglangServer(disaggregation_mode="prefill") as server:
        backend = adapter(server, session)
        offer = await backend.meeting()
        task = asyncio.create_task(backend.prefill(call(offer=offer)))
        while not server.jobs:
            await asyncio.sleep(0.005)
        await asyncio.sleep(0.01)
        load = await backend.telemetry(1.0)
        assert (load.running, load.waiting) == (0, 1)
        task.cancel()


async def test_without_the_metrics_page_the_counts_are_there_all_the_same(session: aiohttp.ClientSession) -> None:
    async with SglangServer() as server:
        load = await adapter(server, session).telemetry(1.0)
        assert (load.max_num_seqs, load.prompt_tokens_total) == (8, 0)


async def test_a_server_without_loads_is_read_by_its_metrics_or_not_at_all(session: aiohttp.ClientSession) -> None:
    async with SglangServer(enable_metrics=True) as server:
        server.loads_missing = True
        load = await adapter(server, session).telemetry(1.0)
        assert (load.running, load.generation_tokens_total) == (1, 7)
    async with SglangServer() as server:
        server.loads_missing = True
        with pytest.raises(EngineError, match="--enable-metrics"):
            await adapter(server, session).telemetry(1.0)


# ---- role -----------------------------------------------------------------------------------------------------------

GRAPHS = {"decode_cuda_graph_bs": [1, 2], "decode_cuda_graph_memory_gb": 0.5}


def switching(mode: str = "prefill", **options: Any) -> SglangServer:
    return SglangServer(disaggregation_mode=mode, enable_pd_role_switch=True, **options)


async def test_a_prefill_engine_becomes_a_decode_engine_with_a_peers_graphs(session: aiohttp.ClientSession) -> None:
    async with switching() as server, switching("decode") as peer:
        settings = await adapter(peer, session).role_settings()
        backend = adapter(server, session)
        switched = await backend.set_role(Role.DECODE, settings)
        assert (switched.old, switched.new, server.mode, server.graphs) == ("prefill", "decode", "decode", peer.graphs)
        assert (await backend.known()).role is Role.DECODE
        back = await backend.set_role(Role.PREFILL)
        assert (back.old, server.mode) == ("decode", "prefill")


async def test_a_role_it_has_is_no_switch(session: aiohttp.ClientSession) -> None:
    async with switching() as server:
        assert (await adapter(server, session).set_role(Role.PREFILL)).already
        assert server.asked == []


@pytest.mark.parametrize(
    ("options", "role", "reason", "field"),
    [
        ({"disaggregation_mode": "prefill"}, Role.DECODE, "not_enabled", "enable_pd_role_switch"),
        ({"disaggregation_mode": "null", "enable_pd_role_switch": True}, Role.DECODE, "no_such_switch", "role"),
        ({"disaggregation_mode": "decode", "enable_pd_role_switch": True}, Role.COLLOCATED, "no_such_switch", "role"),
        (
            {
                "disaggregation_mode": "prefill",
                "enable_pd_role_switch": True,
                "disaggregation_transfer_backend": "nixl",
            },
            Role.DECODE,
            "transfer_backend",
            "disaggregation_transfer_backend",
        ),
        (
            {"disaggregation_mode": "prefill", "enable_pd_role_switch": True},
            Role.DECODE,
            "not_prepared",
            "decode_cuda_graph_memory_gb",
        ),
    ],
)
async def test_a_switch_that_cannot_be_says_why(
    session: aiohttp.ClientSession, options: dict[str, Any], role: Role, reason: str, field: str
) -> None:
    async with SglangServer(**options) as server:
        before = server.mode
        with pytest.raises(RoleRefused) as caught:
            await adapter(server, session).set_role(role)
        assert (caught.value.reason, caught.value.field, caught.value.restorable) == (reason, field, True)
        assert server.mode == before


async def test_nothing_is_switched_while_something_runs(session: aiohttp.ClientSession) -> None:
    async with switching("prefill") as server:
        backend = adapter(server, session)
        task = asyncio.create_task(backend.prefill(call(offer=await backend.meeting())))
        while not server.jobs:
            await asyncio.sleep(0.005)
        await asyncio.sleep(0.01)
        with pytest.raises(RoleRefused) as caught:
            await backend.set_role(Role.DECODE, GRAPHS)
        assert (caught.value.reason, caught.value.again) == ("not_idle", True)
        assert caught.value.field == "prefill_bootstrap_queue_reqs"
        assert "/pd_role_switch" not in server.asked
        task.cancel()


async def test_a_switch_that_broke_half_way_is_not_restorable(session: aiohttp.ClientSession) -> None:
    async with switching() as server:
        server.switch_fails = "kv manager could not be rebuilt"
        with pytest.raises(RoleRefused, match="could not be rebuilt") as caught:
            await adapter(server, session).set_role(Role.DECODE, GRAPHS)
        assert (caught.value.reason, caught.value.restorable) == ("unsafe_to_restore", False)
        assert not await adapter(server, session).ready()


@pytest.mark.parametrize(
    ("told", "message", "reason", "restorable", "again"),
    [
        ("switch_refused", "transfer threads are busy", "engine_refused", True, False),
        ("switch_refused", "scheduler is not idle", "engine_refused", True, True),
        ("switch_fails", "could not be rebuilt: scheduler is not idle", "unsafe_to_restore", False, False),
        ("prepare_fails", "graphs were half captured while not idle", "unsafe_to_restore", False, False),
    ],
)
async def test_what_the_server_says_of_its_state_goes_before_its_words(
    session: aiohttp.ClientSession, told: str, message: str, reason: str, restorable: bool, again: bool
) -> None:
    async with switching() as server:
        setattr(server, told, message)
        with pytest.raises(RoleRefused, match=message) as caught:
            await adapter(server, session).set_role(Role.DECODE, GRAPHS)
        assert (caught.value.reason, caught.value.restorable, caught.value.again) == (reason, restorable, again)
        assert await adapter(server, session).ready() is restorable


@pytest.mark.parametrize("dies_at", ["prepare", "switch"])
async def test_a_server_lost_while_it_is_told_is_not_restorable(session: aiohttp.ClientSession, dies_at: str) -> None:
    async with switching() as server:
        server.dies_at = dies_at
        with pytest.raises(RoleRefused) as caught:
            await adapter(server, session).set_role(Role.DECODE, GRAPHS)
        assert (caught.value.reason, caught.value.restorable, caught.value.again) == ("connection_lost", False, False)


# ---- memory and weights ---------------------------------------------------------------------------------------------


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


async def test_weights_load_from_disk_and_a_failed_load_serves_nobody(session: aiohttp.ClientSession) -> None:
    async with SglangServer() as server:
        backend = adapter(server, session)
        await backend.load_weights(WeightSource("disk"))
        assert (server.weights, await backend.ready()) == ("good", True)
        with pytest.raises(EngineError, match="answered 400") as caught:
            await backend.load_weights(WeightSource("disk", "/nowhere"))
        assert b"no model at /nowhere" in caught.value.body
        assert not await backend.ready()
        await backend.load_weights(WeightSource("disk", "/models/demo"))
        assert await backend.ready()


async def test_a_running_server_takes_no_other_engines_weights(session: aiohttp.ClientSession) -> None:
    async with SglangServer() as server:
        with pytest.raises(NotSupported, match="remote_instance"):
            await adapter(server, session).load_weights(WeightSource("engine", url="http://other"))
