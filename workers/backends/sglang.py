"""Adapter to SGLang's OpenAI server (read against 0.5.23).

Rank goes into `priority`, turned round unless the server puts low values first, and is left out where the server does
not schedule by it (some are started to refuse it then). Our id goes into `rid`, new for each call: an abort by id of an
earlier one cannot hit the next. Prefill and decode are sent together and meet at the prefill engine's bootstrap server.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing
from dataclasses import replace
from itertools import count

import aiohttp
import orjson

from controller.core.types import InstanceSpec, Load, Role
from workers.backends.base import BACKENDS, AnswerChunk, Capabilities, EngineError, Limits, PrefillAnswer, UpstreamCall
from workers.backends.sglang_control import SglangControl
from workers.backends.sglang_state import load_of, parse_loads, parse_metrics
from workers.backends.wire import Connection

ROOM_BITS = 63
NOT_THERE = 404


@BACKENDS.register("sglang")
class SglangBackend(SglangControl):
    """One SGLang server. `/health` is never asked but to wake it: it generates a token, and a failed one sticks."""

    capabilities = Capabilities(handover=True, paired=True)

    def __init__(self, spec: InstanceSpec, session: aiohttp.ClientSession, limits: Limits) -> None:
        super().__init__(spec, session, limits)
        # Its headers may come with its first token only.
        headers_s = max(limits.headers_s, limits.between_chunks_s)
        self._patience = self._patience._replace(headers_s=headers_s)
        self._serial = count()
        self._aborts: set[asyncio.Task[None]] = set()

    # ---- requests --------------------------------------------------------------------------------------------------

    async def generate(self, call: UpstreamCall) -> AsyncIterator[AnswerChunk]:
        """Whatever ends before its end is aborted by id too: a request that waits for its peer holds blocks."""
        await self._introduced()
        rid = f"{next(self._serial):x}.{call.request_id}"
        ended = False
        try:
            async with aclosing(super().generate(replace(call, request_id=rid))) as chunks:  # type: ignore[type-var]
                async for chunk in chunks:
                    yield chunk
            ended = True
        except EngineError as error:
            ended = ended or bool(error.status)
            if error.unreachable:
                self.forget()
            raise _coded(error) from error
        finally:
            if not ended:
                self._abort_soon(rid)

    async def _introduced(self) -> None:
        """Whether it schedules by priority must be known; one too slow to say so gets the request without."""
        try:
            await self.known()
        except EngineError as error:
            if error.unreachable:
                raise

    def body_of(self, call: UpstreamCall) -> bytes:
        tail = b'"rid":"%s"}' % call.request_id.encode()
        info = self._info
        if info is not None and info.on("enable_priority_scheduling"):
            tail = b'"priority":%d,' % (call.rank if info.low_first else -call.rank) + tail
        if call.offer:
            tail = call.offer[1:-1] + b"," + tail
        return call.head + (b"" if call.head.endswith(b"{") else b",") + tail

    async def meeting(self) -> bytes:
        """A room at this engine's bootstrap server, under the host by which we reach it."""
        info = await self.known()
        if info.role is not Role.PREFILL:
            raise EngineError(f"instance {self.spec.id} runs as {info.role}: only a prefill engine has rooms")
        host = self._url("/").host or ""
        room = secrets.randbits(ROOM_BITS)
        return orjson.dumps({"bootstrap_host": host, "bootstrap_port": info.bootstrap_port, "bootstrap_room": room})

    async def prefill(self, call: UpstreamCall, ending: Callable[[bytes], None] | None = None) -> PrefillAnswer:
        """The same body as its decode stage gets; the answer ends when the KV was taken, and says nothing more."""
        async with aclosing(self.generate(call)) as chunks:  # type: ignore[type-var]
            async for _ in chunks:
                pass
        return PrefillAnswer(b"", False)

    def _abort_soon(self, rid: str) -> None:
        task = asyncio.get_running_loop().create_task(self._abort_rid(rid))
        self._aborts.add(task)
        task.add_done_callback(self._aborts.discard)

    async def _abort_rid(self, rid: str) -> None:
        try:
            await self._control("/abort_request", {"rid": rid, "abort_all": False}, self._limits.telemetry_s)
        except (EngineError, RuntimeError):  # gone, or our session is closed: nothing is left to abort for us
            return

    async def _refused(self, response: aiohttp.ClientResponse | Connection) -> EngineError:
        """Its errors lack OpenAI's outer object."""
        error = await super()._refused(response)
        error.body = _openai_shape(error.body)
        return error

    # ---- telemetry -------------------------------------------------------------------------------------------------

    async def telemetry(self, now: float) -> Load:
        """`/ready` says whether it takes requests (a sleeping one is paused), `/v1/loads` the counts, the metrics page,
        where there is one, the token totals; of a server without `/v1/loads` the counts too, some decode steps old."""
        info = await self.known(now)
        awake, loads, page = await asyncio.gather(self.ready(), self._loads(), self._metrics(info.on("enable_metrics")))
        seen = parse_metrics(page)
        if loads is None and not page:
            raise EngineError("SGLang tells no load: it has no /v1/loads and was started without --enable-metrics")
        load = load_of(seen, now) if loads is None else parse_loads(loads, now, info.role)
        return load._replace(
            prompt_tokens_total=int(seen.get("prompt_tokens_total", 0)),
            generation_tokens_total=int(seen.get("generation_tokens_total", 0)),
            awake=awake,
        )

    async def _loads(self) -> bytes | None:
        try:
            return await self._get("/v1/loads?include=core,disagg")
        except EngineError as error:
            if error.status == NOT_THERE:
                return None
            raise

    async def _metrics(self, enabled: bool) -> str:
        return (await self._get("/metrics")).decode() if enabled else ""

    async def ready(self) -> bool:
        try:
            await self._get("/ready")
        except EngineError as error:
            if error.unreachable:
                self.forget()
            return False
        return True


def _openai_shape(body: bytes) -> bytes:
    try:
        said = orjson.loads(body)
    except orjson.JSONDecodeError:
        return body
    if not isinstance(said, dict) or said.get("object") != "error":
        return body
    return orjson.dumps({"error": {name: said.get(name) for name in ("message", "type", "param", "code")}})


def _coded(error: EngineError) -> EngineError:
    """An error inside a stream comes with status 200; what it would have been is in its body."""
    if error.status != 500 or not error.body:
        return error
    try:
        said = orjson.loads(error.body)
        code = int((said.get("error") or said).get("code"))
    except (orjson.JSONDecodeError, AttributeError, TypeError, ValueError):
        return error
    if 400 <= code < 600:
        error.status = code
    return error
