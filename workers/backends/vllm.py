"""Adapter to vLLM's OpenAI server (V1 engine, 0.32 and newer), and to whatever speaks its HTTP dialect.

Rank goes into `priority` (low first, with `--scheduling-policy priority`), our id into `request_id`. The usage event
that every streamed body asks for is dropped unless the client asked too. Closing the connection aborts in vLLM.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace

import aiohttp
from yarl import URL

from controller.core.types import InstanceSpec, Load
from workers.backends.base import BACKENDS, Capabilities, Chunk, EngineError, Limits, Prefilled, UpstreamCall
from workers.backends.events import EventReader, parse_usage
from workers.backends.exposition import parse_load
from workers.backends.handover import parse_prefilled, prefill_head

_HEADERS = {"Content-Type": "application/json", "Accept-Encoding": "identity"}
_MAX_ERROR_BYTES = 64 << 10


@BACKENDS.register("vllm")
class VllmBackend:
    """One vLLM server. `sleep` and `wake` need its development mode; a server without answers 404."""

    capabilities = Capabilities(priority=True, sleep=True, handover=True)

    def __init__(self, spec: InstanceSpec, session: aiohttp.ClientSession, limits: Limits) -> None:
        self.spec = spec
        self._session = session
        self._limits = limits
        self._base = spec.url.rstrip("/")
        self._urls: dict[str, URL] = {}
        self._open: dict[str, aiohttp.ClientResponse] = {}
        self._streamed_timeout = aiohttp.ClientTimeout(
            total=limits.total_s, sock_connect=limits.connect_s, sock_read=limits.between_chunks_s
        )
        self._unary_timeout = aiohttp.ClientTimeout(total=limits.total_s, sock_connect=limits.connect_s)

    async def generate(self, call: UpstreamCall) -> AsyncIterator[Chunk]:
        response = await self._post(call)
        self._open[call.request_id] = response
        try:
            if response.status != 200:
                raise await self._refused(response)
            yield Chunk("accepted")
            if call.streamed:
                async for chunk in self._events(response, call):
                    yield chunk
            else:
                raw = await response.read()
                yield Chunk("body", raw, usage=parse_usage(raw))
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            raise self._engine_error(error) from error
        finally:
            del self._open[call.request_id]
            response.close() if not response.content.at_eof() else response.release()

    async def prefill(self, call: UpstreamCall) -> Prefilled:
        """The pull connectors' first leg: one token, no stream; the answer says where the KV waits."""
        unary = replace(call, head=prefill_head(call.head), streamed=False, keep_usage=False)
        async for chunk in self.generate(unary):
            if chunk.kind == "body":
                return parse_prefilled(chunk.raw)
        raise EngineError("the engine ended the prefill without an answer")

    async def abort(self, request_id: str) -> None:
        """Harmless when the call is over."""
        if response := self._open.get(request_id):
            response.close()

    async def telemetry(self, now: float) -> Load:
        return parse_load((await self._get("/metrics")).decode(), now)

    async def ready(self) -> bool:
        try:
            await self._get("/health")
        except EngineError:
            return False
        return True

    async def sleep(self, level: int = 1) -> None:
        await self._control(f"/sleep?level={level}")

    async def wake(self) -> None:
        await self._control("/wake_up")

    # ---- calls ------------------------------------------------------------------------------------------------------

    def body_of(self, call: UpstreamCall) -> bytes:
        """Our fields go last: the client's own `request_id` or `priority` were stripped before."""
        tail = b'"priority":%d,"request_id":"%s"}' % (call.rank, call.request_id.encode())
        if call.offer:
            tail = b'"kv_transfer_params":%s,' % call.offer + tail
        return call.head + (b"" if call.head.endswith(b"{") else b",") + tail

    async def _post(self, call: UpstreamCall) -> aiohttp.ClientResponse:
        """A kept-alive connection may have died unnoticed: one immediate second try, nothing was answered yet."""
        try:
            try:
                return await self._start(call)
            except aiohttp.ServerDisconnectedError:
                return await self._start(call)
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            raise self._engine_error(error) from error

    async def _start(self, call: UpstreamCall) -> aiohttp.ClientResponse:
        request = self._session.post(
            self._url(call.path),
            data=self.body_of(call),
            headers=_HEADERS,
            timeout=self._streamed_timeout if call.streamed else self._unary_timeout,
        )
        if not call.streamed:
            return await request
        async with asyncio.timeout(self._limits.headers_s):
            return await request

    async def _events(self, response: aiohttp.ClientResponse, call: UpstreamCall) -> AsyncIterator[Chunk]:
        reader = EventReader(chat=call.path.endswith("/chat/completions"), keep_usage=call.keep_usage)
        content = response.content
        while data := await content.readany():
            if chunk := reader.feed(data):
                yield chunk
                if chunk.done:
                    await content.readany()  # the terminator, so that the connection can be kept
                    return
        raise EngineError("the engine ended the stream without [DONE]")

    async def _refused(self, response: aiohttp.ClientResponse) -> EngineError:
        body = await response.content.read(_MAX_ERROR_BYTES)
        return EngineError(f"the engine answered {response.status}", status=response.status, body=body)

    async def _get(self, path: str) -> bytes:
        timeout = aiohttp.ClientTimeout(total=self._limits.telemetry_s)
        try:
            async with self._session.get(self._url(path), timeout=timeout) as response:
                if response.status != 200:
                    raise await self._refused(response)
                return await response.read()
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            raise self._engine_error(error) from error

    async def _control(self, path: str) -> None:
        timeout = aiohttp.ClientTimeout(total=self._limits.control_s, sock_connect=self._limits.connect_s)
        try:
            async with self._session.post(self._url(path), timeout=timeout) as response:
                if response.status != 200:
                    raise await self._refused(response)
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            raise self._engine_error(error) from error

    def _engine_error(self, error: BaseException) -> EngineError:
        """A reset, a refusal or a cut body mean nobody is there any more; a time-out only that it is slow."""
        gone = isinstance(error, (aiohttp.ClientConnectionError, aiohttp.ClientPayloadError, ConnectionError))
        unreachable = gone and not isinstance(error, TimeoutError)
        what = "did not answer in time" if isinstance(error, TimeoutError) else f"cannot be reached: {error}"
        return EngineError(f"instance {self.spec.id} {what}", unreachable=unreachable)

    def _url(self, path: str) -> URL:
        url = self._urls.get(path)
        if url is None:
            url = self._urls[path] = URL(self._base + path, encoded=True)
        return url
