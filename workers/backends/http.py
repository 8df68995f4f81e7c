"""What all adapters to OpenAI-compatible servers share: calls with explicit limits, streams cut into events, errors.

Closing the connection is how every one of them is told to abort; an engine that wants more overrides `generate`.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any

import aiohttp
import orjson
from yarl import URL

from controller.core.kv_links import LinkReport
from controller.core.types import InstanceSpec, Role
from workers.backends.base import AnswerChunk, EngineError, Limits, NotSupported, RoleSwitch, UpstreamCall
from workers.backends.disaggregation import KV_MOVED, KV_OFFER, kv_moved
from workers.backends.events import EventReader, check_whole, parse_usage
from workers.backends.wire import Connection, Patience, Unanswered, Wire

_HEADERS = {"Content-Type": "application/json", "Accept-Encoding": "identity"}
_MAX_ERROR_BYTES = 64 << 10


class HttpBackend(ABC):
    """One server. A subclass says what goes into a body (`body_of`) and what else the engine can do."""

    kind = "This engine"  # its name in messages

    def __init__(self, spec: InstanceSpec, session: aiohttp.ClientSession, limits: Limits) -> None:
        self.spec = spec
        self._session = session
        self._limits = limits
        self._base = spec.url.rstrip("/")
        self._urls: dict[str, URL] = {}
        self._wire = Wire(self._base)
        self._patience = Patience(limits.connect_s, limits.headers_s, limits.between_chunks_s, limits.total_s)
        self._unary_patience = Patience(limits.connect_s, math.inf, math.inf, limits.total_s)

    async def generate(self, call: UpstreamCall) -> AsyncIterator[AnswerChunk]:
        response = await self._post(call)
        try:
            if response.status != 200:
                raise await self._refused(response)
            offer = response.headers.get(KV_OFFER, "").encode()
            yield AnswerChunk("accepted", moved=kv_moved(response.headers.get(KV_MOVED)), offer=offer)
            if call.streamed:
                async for chunk in self._events(response, call):
                    yield chunk
            else:
                raw = await response.read()
                check_whole(raw)
                yield AnswerChunk("body", raw, usage=parse_usage(raw))
        except OSError as error:
            raise self._engine_error(error) from error
        finally:
            response.release()

    async def ready(self) -> bool:
        try:
            await self._get("/health")
        except EngineError:
            return False
        return True

    async def free_kv(self, request_ids: Sequence[str]) -> None:
        raise NotSupported(f"{self.kind} frees KV by itself: when it was pulled, or when its lease ends.")

    async def links(self) -> Sequence[LinkReport]:
        raise NotSupported(f"{self.kind} does not tell of its links.")

    async def meeting(self) -> bytes:
        raise NotSupported(f"{self.kind} sends no stages in pairs: its decode stage takes what its prefill answered.")

    async def role_settings(self) -> Mapping[str, Any]:
        return {}

    async def role(self) -> Role:
        return self.spec.role

    async def set_role(self, role: Role, settings: Mapping[str, Any] | None = None) -> RoleSwitch:
        raise NotSupported(f"{self.kind} has no switch: it takes either stage of a request, and a role is routing.")

    # ---- calls ------------------------------------------------------------------------------------------------------

    @abstractmethod
    def body_of(self, call: UpstreamCall) -> bytes:
        """The whole JSON body: the client's head, then what is ours."""

    async def _post(self, call: UpstreamCall) -> Connection:
        """A kept-alive connection may have died unnoticed: one immediate second try, nothing was answered yet."""
        body, patience = self.body_of(call), self._patience if call.streamed else self._unary_patience
        try:
            try:
                return await self._wire.post(call.path, body, patience)
            except Unanswered:
                return await self._wire.post(call.path, body, patience, anew=True)
        except OSError as error:
            raise self._engine_error(error) from error

    async def _events(self, response: Connection, call: UpstreamCall) -> AsyncIterator[AnswerChunk]:
        reader = EventReader(chat=call.path.endswith("/chat/completions"), keep_usage=call.keep_usage)
        while data := await response.readany():
            if chunk := reader.feed(data):
                yield chunk
                if chunk.done:
                    await response.readany()  # the terminator, so that the connection can be kept
                    return
        raise EngineError("the engine ended the stream without [DONE]")

    async def _refused(self, response: aiohttp.ClientResponse | Connection) -> EngineError:
        """The start of what it said: whoever closes or releases an answer that was not read to its end ends it."""
        read = response.readany if isinstance(response, Connection) else response.content.readany
        body = b""
        while len(body) < _MAX_ERROR_BYTES and (part := await read()):
            body += part
        return EngineError(
            f"the engine answered {response.status}", status=response.status, body=body[:_MAX_ERROR_BYTES]
        )

    async def _get(self, path: str, limit_s: float | None = None) -> bytes:
        timeout = aiohttp.ClientTimeout(total=self._limits.telemetry_s if limit_s is None else limit_s)
        try:
            async with self._session.get(self._url(path), timeout=timeout) as response:
                if response.status != 200:
                    raise await self._refused(response)
                return await response.read()
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            raise self._engine_error(error) from error

    async def _control(self, path: str, body: Mapping[str, Any] | None = None, limit_s: float | None = None) -> bytes:
        """POST what may take as long as `control_s`; its answer. Raises EngineError on any status but 200."""
        total_s = self._limits.control_s if limit_s is None else limit_s
        timeout = aiohttp.ClientTimeout(total=total_s, sock_connect=self._limits.connect_s)
        data = None if body is None else orjson.dumps(body)
        headers = None if body is None else _HEADERS
        try:
            async with self._session.post(self._url(path), data=data, headers=headers, timeout=timeout) as response:
                if response.status != 200:
                    raise await self._refused(response)
                return await response.read()
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
