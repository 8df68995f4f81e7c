"""The SGLang adapter against the contract fake: what is sent, what is understood, what is refused and why."""

from __future__ import annotations

import asyncio
from contextlib import aclosing

import aiohttp
import orjson
import pytest

from tests.workers.backends.sglang_calls import adapter, call, collect
from tests.workers.backends.sglang_server import SglangServer
from workers.backends.base import EngineError

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


@pytest.mark.parametrize("streamed", [True, False])
async def test_what_is_only_queued_there_is_aborted_by_id_and_no_one_waits_for_that(
    session: aiohttp.ClientSession, streamed: bool
) -> None:
    async with SglangServer() as server:
        server.hold.clear()
        backend = adapter(server, session)
        task = asyncio.create_task(collect(backend, call(streamed=streamed)))
        async with asyncio.timeout(5):
            while not server.jobs:
                await asyncio.sleep(0.005)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert server.aborted == [], "told beside the request's own path"
        async with asyncio.timeout(5):
            while server.jobs:
                await asyncio.sleep(0.005)
        assert server.aborted == [server.bodies[0]["rid"]]


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
        assert caught.value.status == 500
        assert server.aborted == []  # it is over there


async def test_errors_get_openais_shape_and_keep_their_status(session: aiohttp.ClientSession) -> None:
    async with SglangServer(disaggregation_mode="prefill") as server:
        with pytest.raises(EngineError) as caught:
            await collect(adapter(server, session), call())
        assert (caught.value.status, caught.value.client_fault) == (400, True)
        assert "bootstrap_room" in orjson.loads(caught.value.body)["error"]["message"]


async def test_no_one_listening_is_unreachable(session: aiohttp.ClientSession) -> None:
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
        while not any(job.stage == "prefill_bootstrap_queue_reqs" for job in server.jobs.values()):
            await asyncio.sleep(0.005)
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
