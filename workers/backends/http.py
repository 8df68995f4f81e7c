"""What all adapters to OpenAI-compatible servers share: calls with explicit limits, streams cut into events, errors.

Closing the connection tells every one of them to abort; an adapter whose engine needs more overrides `generate`.

`EventReader` counts the tokens of a stream without parsing JSON. An event counts as a token when it carries text, and
also when it carries none but the answer goes on: tokens that are part of a character, or that the tokenizer skips, have
no text yet and were computed anyway (vLLM sends an event for each). A chat's opening event, which names the role,
does not count. Quotes inside a JSON string are always escaped, so the byte patterns below cannot occur within generated
text. Only the usage event (empty `choices`) and errors are parsed.
"""

from __future__ import annotations

import asyncio
import logging
import math
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any

import aiohttp
import orjson
from yarl import URL

from controller.core.kv_links import BorrowedKv, KvMoved, LinkReport, borrowed_from_json, moved_from_json
from controller.core.types import InstanceSpec, Role
from workers.backends.base import (
    MOST_TOLD_TOKENS,
    AnswerChunk,
    EngineError,
    Limits,
    NotSupported,
    RoleSwitch,
    UpstreamCall,
    Usage,
)
from workers.http.engine_keys import EngineKey, NoEngineKey
from workers.http.outbound import read_answer
from workers.http.wire import BadAnswer, Connection, Patience, Unanswered, Wire

log = logging.getLogger(__name__)

KV_MOVED = "x-slackline-kv"
KV_OFFER = "x-slackline-kv-offer"
KV_PREFIX = "x-slackline-kv-prefix"
MAX_EVENT_BYTES = 1 << 20  # an engine that never ends an event must not fill the memory
DONE = b"data: [DONE]"
ERROR_HEADS = (b'data: {"error"', b'data: {"object":"error"', b'data: {"object": "error"')
KV_BEGAN = b": kv-began"  # of the reference engine: the KV of this answer begins to come
KV_COMMENT = b": kv "  # of the reference engine: how the KV of this answer came
PREFIX_COMMENT = b": kv-prefix "  # of the reference engine: how a prefix of its prompt came from another engine
CR = ord("\r")
REASONING = (b'"reasoning_content":"', b'"reasoning":"', b'"reasoning_content": "', b'"reasoning": "')
EMPTY_CHOICES = (b'"choices":[]', b'"choices": []')
ABORTED = (b'"finish_reason":"abort"', b'"finish_reason": "abort"')
_HEADERS = {"Content-Type": "application/json", "Accept-Encoding": "identity"}
_MAX_ERROR_BYTES = 64 << 10


class HttpBackend(ABC):
    """One server. A subclass builds the body (`body_of`) and adds what else its engine can do."""

    kind = "This engine"  # its name in messages

    def __init__(self, spec: InstanceSpec, session: aiohttp.ClientSession, limits: Limits) -> None:
        self.spec = spec
        self._session = session
        self._limits = limits
        self._base = spec.url.rstrip("/")
        self._urls: dict[str, URL] = {}
        self._wire = Wire(self._base)
        self._key = EngineKey(spec.key, spec.id, spec.url)
        self._patience = Patience(limits.connect_s, limits.headers_s, limits.between_chunks_s, limits.total_s)
        self._unary_patience = Patience(limits.connect_s, math.inf, math.inf, limits.total_s)

    async def generate(self, call: UpstreamCall) -> AsyncIterator[AnswerChunk]:
        response = await self._post(call)
        try:
            if response.status != 200:
                raise await self._refused(response)
            offer = response.headers.get(KV_OFFER, "").encode()
            moved, borrowed = (response.headers.get(name) for name in (KV_MOVED, KV_PREFIX))
            yield AnswerChunk("accepted", moved=kv_moved(moved), offer=offer, borrowed=kv_borrowed(borrowed))
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

    async def renew_kv(self, request_id: str, lease_s: float) -> bool:
        raise NotSupported(f"{self.kind} keeps no checkpoints.")

    async def tell_bounds(self, bounds: Mapping[str, tuple[int, int]]) -> None:
        raise NotSupported(f"{self.kind} reads no bounds of answers.")

    async def links(self) -> Sequence[LinkReport]:
        raise NotSupported(f"{self.kind} does not report its links.")

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
        """The whole JSON body: the client's head, then our fields."""

    async def _post(self, call: UpstreamCall) -> Connection:
        """Retried once, at once, if a kept connection turns out dead: then nothing was answered yet."""
        body, patience = self.body_of(call), self._patience if call.streamed else self._unary_patience
        headers = self._key_headers()
        try:
            try:
                return await self._wire.post(call.path, body, patience, headers=headers)
            except Unanswered:
                return await self._wire.post(call.path, body, patience, fresh=True, headers=headers)
        except OSError as error:
            raise self._engine_error(error) from error

    async def _events(self, response: Connection, call: UpstreamCall) -> AsyncIterator[AnswerChunk]:
        reader = EventReader(chat=call.path.endswith("/chat/completions"), keep_usage=call.keep_usage)
        clock, began = asyncio.get_running_loop().time, None  # when the event began that has not ended yet
        while data := await response.readany():
            if chunk := reader.feed(data):
                began = None
                yield chunk
                if chunk.done:
                    await response.readany()  # the terminator, so that the connection can be kept
                    return
            elif began is None:
                began = clock()
            elif clock() - began > self._limits.between_chunks_s:
                raise EngineError("the engine sent an event that does not end")
        raise EngineError("the engine ended the stream without [DONE]")

    async def _refused(self, response: aiohttp.ClientResponse | Connection) -> EngineError:
        """An error with the start of its body. The caller closes or releases the answer, which ends the rest of it."""
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
            headers = self._key_headers()
            getting = self._session.get(self._url(path), headers=headers, timeout=timeout, allow_redirects=False)
            async with getting as response:
                if response.status != 200:
                    raise await self._refused(response)
                return await read_answer(response)
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            raise self._engine_error(error) from error

    async def _control(
        self,
        path: str,
        body: Mapping[str, Any] | bytes | None = None,
        limit_s: float | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> bytes:
        """POST a command that may take `control_s`. Returns its answer; raises EngineError on any status but 200."""
        total_s = self._limits.control_s if limit_s is None else limit_s
        timeout = aiohttp.ClientTimeout(total=total_s, sock_connect=self._limits.connect_s)
        data = body if body is None or isinstance(body, bytes) else orjson.dumps(body)
        told = {**(_HEADERS if data is not None else {}), **self._key_headers(), **(headers or {})}
        try:
            ordered = self._session.post(
                self._url(path), data=data, headers=told, timeout=timeout, allow_redirects=False
            )
            async with ordered as response:
                if response.status != 200:
                    raise await self._refused(response)
                return await read_answer(response)
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            raise self._engine_error(error) from error

    def _key_headers(self) -> dict[str, str]:
        """Raises EngineError."""
        if not self.spec.key:
            return {}
        try:
            return self._key.headers()
        except NoEngineKey as error:
            raise EngineError(f"instance {self.spec.id}: {error}") from error

    def _engine_error(self, error: BaseException) -> EngineError:
        """A reset, a refusal or a cut body mean that the engine is gone; a time-out only that it is slow."""
        gone = isinstance(error, (aiohttp.ClientConnectionError, aiohttp.ClientPayloadError, ConnectionError))
        unreachable = gone and not isinstance(error, TimeoutError)
        what = "did not answer in time" if isinstance(error, TimeoutError) else f"cannot be reached: {_told(error)}"
        lost = unreachable and not isinstance(error, (aiohttp.ClientConnectorError, ConnectionRefusedError))
        return EngineError(f"instance {self.spec.id} {what}", unreachable=unreachable, lost=lost)

    def _url(self, path: str) -> URL:
        url = self._urls.get(path)
        if url is None:
            url = self._urls[path] = URL(self._base + path, encoded=True)
        return url


def _told(error: BaseException) -> str:
    """What is said of an engine that cannot be reached: not what its host answered, which may be anybody's, nor
    whether anything listens there."""
    if isinstance(error, BadAnswer | aiohttp.ClientPayloadError):
        log.info("an engine's answer cannot be read: %s", error)
    return "no connection, or it was lost"


# ---- events of a stream ---------------------------------------------------------------------------------------------


def delivers_token(event: bytes, chat: bool) -> bool:
    """True when the event delivers at least one token (of text, reasoning or a tool call, or without any text yet)."""
    if not chat:
        if b'"text":""' not in event and b'"text": ""' not in event:
            return b'"text"' in event
        return _goes_on(event)
    if b'"content":"' in event or b'"content": "' in event:
        if b'"content":""' not in event and b'"content": ""' not in event:
            return True
        if b'"role":"' not in event and b'"role": "' not in event and _goes_on(event):
            return True
    return any(mark in event for mark in REASONING) or b'"tool_calls":[{' in event


def answers(event: bytes) -> bool:
    """Whether a chat's event that delivers tokens has some of the answer: text, or a piece of a tool call."""
    if b'"tool_calls":[{' in event:
        return True
    said = b'"content":"' in event or b'"content": "' in event
    return said and b'"content":""' not in event and b'"content": ""' not in event


def _goes_on(event: bytes) -> bool:
    return b'"finish_reason":null' in event or b'"finish_reason": null' in event


def check_whole(raw: bytes) -> None:
    """Raises EngineError for an answer, or events of one, that the engine aborted: it reports that under HTTP 200."""
    if b'"abort"' in raw and any(mark in raw for mark in ABORTED):  # usually one search for each chunk of a stream
        raise EngineError("the engine aborted the request", status=500)


def told_count(value: object) -> int | None:
    """A count of tokens as an engine tells it: a whole number from 0 to MOST_TOLD_TOKENS. None for anything else, since
    quotas, records and predictions count with it."""
    return value if type(value) is int and 0 <= value <= MOST_TOLD_TOKENS else None


def parse_usage(raw: bytes) -> Usage | None:
    """The `usage` object of a JSON answer or usage event; None without one, or with a figure that is no count."""
    try:
        usage = orjson.loads(raw).get("usage")
        prompt, completion = usage["prompt_tokens"], usage.get("completion_tokens")
    except (orjson.JSONDecodeError, AttributeError, KeyError, TypeError):
        return None
    counts = told_count(prompt), told_count(0 if completion is None else completion)
    return None if counts[0] is None or counts[1] is None else Usage(counts[0], counts[1])


class EventReader:
    """Cuts a byte stream into whole events and reads what is in them. One object for each stream."""

    __slots__ = ("_answering", "_chat", "_keep_usage", "_reasoning", "_rest", "_tokens")

    def __init__(self, *, chat: bool, keep_usage: bool) -> None:
        self._chat = chat
        self._keep_usage = keep_usage
        self._rest = bytearray()  # of an event that has begun
        self._tokens = self._reasoning = 0  # so far; and of those, before the answer
        self._answering = not chat  # it has begun

    def feed(self, data: bytes) -> AnswerChunk | None:
        """The whole events received so far as one chunk; None when none is complete yet."""
        rest = self._rest
        if rest and rest[-1] == CR:
            data = b"\r" + data
            del rest[-1]
        if b"\r" in data:
            data = data.replace(b"\r\n", b"\n")
        if rest:
            new = len(rest) - 1  # an end may begin with the last byte; what is before was searched already
            rest += data
            end = rest.rfind(b"\n\n", new) + 2
            whole = bytes(rest[:end]) if end > 1 else b""
            del rest[: len(whole)]
        else:
            end = data.rfind(b"\n\n") + 2
            whole = data[:end] if end > 1 else b""
            rest += data[len(whole) :]
        if len(rest) > MAX_EVENT_BYTES:
            raise EngineError(f"the engine sent an event of more than {MAX_EVENT_BYTES} bytes")
        if not whole:
            return None
        check_whole(whole)
        return self._read(whole, whole[:-2].split(b"\n\n"))

    def _read(self, whole: bytes, events: list[bytes]) -> AnswerChunk:
        tokens, usage, done, dropped, pulling = 0, None, False, False, False
        moved: KvMoved | None = None
        borrowed: BorrowedKv | None = None
        kept: list[bytes] = []
        for event in events:
            if event.startswith(DONE):
                done = True
            elif event.startswith(ERROR_HEADS):
                raise EngineError("the engine reported an error inside the stream", status=500, body=event[6:])
            elif any(empty in event for empty in EMPTY_CHOICES) and b'"usage"' in event:
                usage = parse_usage(event[6:]) or usage
                if not self._keep_usage:
                    dropped = True
                    continue
            elif event == KV_BEGAN:
                pulling = dropped = True
                continue
            elif event.startswith(KV_COMMENT):
                moved, dropped = kv_moved(event.removeprefix(KV_COMMENT)), True
                continue
            elif event.startswith(PREFIX_COMMENT):
                borrowed, dropped = kv_borrowed(event.removeprefix(PREFIX_COMMENT)), True
                continue
            elif delivers_token(event, self._chat):
                tokens += 1
                self._tokens += 1
                if not self._answering:
                    self._reason(event)
            kept.append(event)
        raw = b"\n\n".join([*kept, b""]) if dropped else whole
        return AnswerChunk("data", raw, tokens, usage, done, moved, b"", pulling, self._reasoning, borrowed)

    def _reason(self, event: bytes) -> None:
        """Of an event that delivers a token. Where it has both, the answer has begun. One without text belongs to what
        comes before it, and at the start to what follows."""
        if answers(event):
            self._answering = True
        elif self._reasoning or any(mark in event for mark in REASONING):
            self._reasoning = self._tokens


def kv_moved(header: str | bytes | None) -> KvMoved | None:
    """How the KV came, from a header (in a stream: a comment) of the reference engine; None if it cannot be read."""
    return moved_from_json(_json_in(header)) if header else None


def kv_borrowed(header: str | bytes | None) -> BorrowedKv | None:
    """The same of a prefix that another engine lent."""
    return borrowed_from_json(_json_in(header)) if header else None


def _json_in(header: str | bytes) -> Any:
    try:
        return orjson.loads(header)
    except orjson.JSONDecodeError:
        return None
