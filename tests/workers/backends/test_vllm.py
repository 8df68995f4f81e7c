"""The adapter over real sockets: a small server that speaks vLLM's dialect, well and badly."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from controller.core.types import InstanceSpec
from workers.backends.base import AnswerChunk, EngineError, Limits, UpstreamCall, Usage
from workers.backends.registry import backend_for
from workers.backends.vllm import VllmBackend

EVENT = b'data: {"choices":[{"index":0,"text":" hi","finish_reason":null}]}\n\n'
USAGE = b'data: {"choices":[],"usage":{"prompt_tokens":3,"total_tokens":5,"completion_tokens":2}}\n\n'
DONE = b"data: [DONE]\n\n"


class Engine:
    """`behave` answers a completion; what came in is in `bodies`."""

    def __init__(self) -> None:
        self.bodies: list[dict[str, Any]] = []
        self.peers: set[object] = set()  # connections that asked
        self.closed = asyncio.Event()
        self.script: list[bytes | float] = [EVENT, EVENT, USAGE, DONE]
        self.status = 200
        self.finish = "stop"  # of a whole answer
        self.queued_s = 0.0  # before it answers anything
        self.url = ""

    async def completions(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.bodies.append(body)
        assert request.transport is not None
        self.peers.add(request.transport.get_extra_info("peername"))
        if self.status != 200:
            return web.json_response({"error": {"message": "no", "code": self.status}}, status=self.status)
        if self.queued_s:
            try:
                await asyncio.sleep(self.queued_s)
            except asyncio.CancelledError:
                self.closed.set()
                raise
        if not body.get("stream"):
            choice = {"index": 0, "text": " hi", "finish_reason": self.finish}
            usage = {"prompt_tokens": 3, "completion_tokens": 2}
            return web.json_response({"choices": [choice], "usage": usage})
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(request)
        try:
            for step in self.script:
                await (asyncio.sleep(step) if isinstance(step, float) else response.write(step))
        except (ConnectionError, asyncio.CancelledError):
            self.closed.set()
            raise
        if DONE not in self.script:
            assert request.transport is not None
            request.transport.abort()
        return response

    async def metrics(self, request: web.Request) -> web.Response:
        return web.Response(text='vllm:num_requests_running{engine="0"} 2.0\n', status=self.status)


@pytest.fixture
async def engine() -> AsyncIterator[Engine]:
    engine = Engine()
    app = web.Application()
    app.router.add_post("/v1/completions", engine.completions)
    app.router.add_get("/metrics", engine.metrics)
    app.router.add_get("/health", engine.metrics)
    runner = web.AppRunner(app, handler_cancellation=True)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    engine.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    yield engine
    await runner.cleanup()


def adapter(engine: Engine, session: aiohttp.ClientSession, **limits: float) -> VllmBackend:
    backend = backend_for(InstanceSpec("e1", "demo", url=engine.url), session, Limits(**limits))
    assert isinstance(backend, VllmBackend)
    return backend


def call(streamed: bool = True, keep_usage: bool = False) -> UpstreamCall:
    flag = b'true,"stream_options":{"include_usage":true}' if streamed else b"false"
    return UpstreamCall("req-1", "/v1/completions", b'{"model":"demo","stream":' + flag, 42, streamed, keep_usage)


async def collect(backend: VllmBackend, upstream: UpstreamCall) -> list[AnswerChunk]:
    return [chunk async for chunk in backend.generate(upstream)]


async def test_a_stream_is_relayed_as_it_is_and_counted(engine: Engine, session: aiohttp.ClientSession) -> None:
    chunks = await collect(adapter(engine, session), call())
    assert chunks[0].kind == "accepted"
    assert b"".join(chunk.raw for chunk in chunks) == EVENT + EVENT + DONE
    assert sum(chunk.tokens for chunk in chunks) == 2
    assert [chunk.usage for chunk in chunks if chunk.usage] == [Usage(3, 2)]
    assert chunks[-1].done


async def test_rank_and_id_are_added_to_the_body(engine: Engine, session: aiohttp.ClientSession) -> None:
    await collect(adapter(engine, session), call())
    assert engine.bodies == [
        {
            "model": "demo",
            "stream": True,
            "priority": 42,
            "request_id": "req-1",
            "stream_options": {"include_usage": True},
        }
    ]


async def test_a_whole_answer_comes_as_one_body(engine: Engine, session: aiohttp.ClientSession) -> None:
    accepted, body = await collect(adapter(engine, session), call(streamed=False))
    assert (accepted.kind, body.kind, body.usage) == ("accepted", "body", Usage(3, 2))
    assert "usage" in json.loads(body.raw)
    assert "stream_options" not in engine.bodies[0]


@pytest.mark.parametrize(("status", "fault"), [(400, True), (404, True), (429, False), (503, False), (500, False)])
async def test_an_error_answer_tells_whose_fault_it_is(
    engine: Engine, session: aiohttp.ClientSession, status: int, fault: bool
) -> None:
    engine.status = status
    with pytest.raises(EngineError) as caught:
        await collect(adapter(engine, session), call())
    assert (caught.value.status, caught.value.client_fault, caught.value.unreachable) == (status, fault, False)
    assert b'"no"' in caught.value.body


async def test_a_stream_that_breaks_off_is_an_unreachable_engine(
    engine: Engine, session: aiohttp.ClientSession
) -> None:
    engine.script = [EVENT, EVENT]
    with pytest.raises(EngineError) as caught:
        await collect(adapter(engine, session), call())
    assert caught.value.unreachable


async def test_a_whole_answer_that_the_engine_gave_up_is_no_answer(
    engine: Engine, session: aiohttp.ClientSession
) -> None:
    engine.finish = "abort"
    backend = adapter(engine, session)
    with pytest.raises(EngineError, match="aborted") as caught:
        await collect(backend, call(streamed=False))
    assert (caught.value.client_fault, caught.value.unreachable) == (False, False)
    with pytest.raises(EngineError, match="aborted"):  # nor has such a prefill ended with its first token
        await backend.prefill(call(streamed=False))


async def test_no_one_listening_is_unreachable(engine: Engine, session: aiohttp.ClientSession) -> None:
    engine.url = "http://127.0.0.1:1"
    with pytest.raises(EngineError) as caught:
        await collect(adapter(engine, session), call())
    assert caught.value.unreachable
    assert not await adapter(engine, session).ready()


async def test_silence_ends_at_its_limit_and_is_not_death(engine: Engine, session: aiohttp.ClientSession) -> None:
    engine.script = [EVENT, 30.0, DONE]
    with pytest.raises(EngineError) as caught:
        await collect(adapter(engine, session, between_chunks_s=0.1), call())
    assert not caught.value.unreachable


async def test_closing_the_iterator_closes_the_call(engine: Engine, session: aiohttp.ClientSession) -> None:
    engine.script = [EVENT, 30.0, DONE]
    backend = adapter(engine, session)
    async with aclosing(backend.generate(call())) as chunks:
        async for chunk in chunks:
            if chunk.tokens:
                break
    assert await asyncio.wait_for(engine.closed.wait(), 5)


@pytest.mark.parametrize("streamed", [True, False])
async def test_a_call_that_is_only_queued_there_is_closed_by_its_cancellation(
    engine: Engine, session: aiohttp.ClientSession, streamed: bool
) -> None:
    engine.queued_s = 30.0
    asked = asyncio.create_task(collect(adapter(engine, session), call(streamed)))
    async with asyncio.timeout(5):
        while not engine.bodies:
            await asyncio.sleep(0.005)
    asked.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asyncio.wait_for(asked, 1)
    await asyncio.wait_for(engine.closed.wait(), 5)


async def test_connections_are_kept_for_the_next_call(engine: Engine, session: aiohttp.ClientSession) -> None:
    backend = adapter(engine, session)
    for _ in range(3):
        await collect(backend, call())
    await collect(backend, call(streamed=False))
    assert len(engine.bodies) == 4
    assert len(engine.peers) == 1


async def test_telemetry_reads_the_metrics_page(engine: Engine, session: aiohttp.ClientSession) -> None:
    load = await adapter(engine, session).telemetry(7.0)
    assert (load.observed_at, load.running) == (7.0, 2)
    engine.status = 500
    with pytest.raises(EngineError):
        await adapter(engine, session).telemetry(8.0)


def test_names_and_capabilities() -> None:
    spec = InstanceSpec("e1", "demo", backend="reference")
    backend = backend_for(spec, None, Limits())  # type: ignore[arg-type]
    assert backend.capabilities.frees_kv
    assert not VllmBackend.capabilities.frees_kv
