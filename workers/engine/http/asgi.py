"""A minimal HTTP layer on ASGI: routes, bodies, JSON responses, errors."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Awaitable, Callable, Iterator, Mapping, MutableMapping
from typing import Any
from urllib.parse import parse_qs

import orjson

from workers.engine.errors import HttpError
from workers.http.limits import LIMITS

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]

JSON_TYPE = b"application/json"
logger = logging.getLogger(__name__)


class Disconnected(Exception):
    """The client disconnected before its request was complete."""


class BodyRoom:
    """Bytes of bodies that may be held together while they are read."""

    def __init__(self, most: int) -> None:
        self.most = most
        self.held = 0

    @contextlib.contextmanager
    def take(self, size: int) -> Iterator[None]:
        """Raises HttpError 503 without room for it."""
        if self.held + size > self.most:
            raise HttpError("too many bodies are being received", status=503)
        self.held += size
        try:
            yield
        finally:
            self.held -= size


class Exchange:
    """One HTTP request and its response."""

    __slots__ = ("_most", "_receive", "_scope", "_send", "started")

    def __init__(
        self, scope: Scope, receive: Receive, send: Send, body_bytes: int = LIMITS["engine"].body_bytes
    ) -> None:
        self._most = body_bytes
        self._scope = scope
        self._receive = receive
        self._send = send
        self.started = False

    @property
    def method(self) -> str:
        return str(self._scope["method"])

    @property
    def path(self) -> str:
        return str(self._scope["path"])

    @property
    def headers(self) -> Mapping[bytes, bytes]:
        """Header values by lower-case name; of a repeated header, the last one."""
        return dict(self._scope["headers"])

    def header(self, name: str) -> str:
        """Its value; "" without it."""
        return self.headers.get(name.encode(), b"").decode("latin-1")

    @property
    def target(self) -> str:
        """Path and query, as the client wrote them."""
        query = self._scope["query_string"].decode("latin-1")
        return f"{self.path}?{query}" if query else self.path

    @property
    def local(self) -> tuple[str, int]:
        """This engine's end of the connection, whatever the client says."""
        host, port = self._scope.get("server") or ("", 0)
        return str(host), int(port or 0)

    def query(self) -> dict[str, list[str]]:
        return parse_qs(self._scope["query_string"].decode("latin-1"))

    async def body(self, most: int | None = None, room: BodyRoom | None = None) -> bytes:
        """Raises HttpError for one of more than `most` bytes (default: what the server takes), or without `room`."""
        most = self._most if most is None else most
        received = bytearray()
        more = True
        with contextlib.ExitStack() as held:
            while more:
                message = await self._receive()
                if message["type"] == "http.disconnect":
                    raise Disconnected
                piece = message.get("body", b"")
                if room is not None:
                    held.enter_context(room.take(len(piece)))
                received += piece
                more = message.get("more_body", False)
                if len(received) > most:
                    raise HttpError(f"the body is larger than {most} bytes", status=413)
        return bytes(received)

    async def json(self, empty: bool = False) -> dict[str, Any]:
        """The body, read by `json_object`. Raises HttpError, Disconnected."""
        return json_object(await self.body(), empty)

    async def disconnected(self) -> None:
        """Return when the client disconnects or the response is complete. Call it after the body was read."""
        while (await self._receive())["type"] != "http.disconnect":
            continue

    async def start(self, status: int, content_type: bytes, *headers: tuple[bytes, bytes]) -> None:
        self.started = True
        fields = [(b"content-type", content_type), *headers]
        await self._send({"type": "http.response.start", "status": status, "headers": fields})

    async def write(self, data: bytes, more: bool = True) -> None:
        await self._send({"type": "http.response.body", "body": data, "more_body": more})

    async def answer(
        self, data: bytes, status: int = 200, content_type: bytes = JSON_TYPE, *headers: tuple[bytes, bytes]
    ) -> None:
        await self.start(status, content_type, (b"content-length", str(len(data)).encode()), *headers)
        await self.write(data, more=False)

    async def reply(self, value: Any, status: int = 200) -> None:
        await self.answer(orjson.dumps(value), status)


Handler = Callable[[Exchange], Awaitable[None]]


def json_object(raw: bytes, empty: bool = False) -> dict[str, Any]:
    """A body as a JSON object. `empty`: whether a missing body counts as an empty object. Raises HttpError."""
    if empty and not raw:
        return {}
    try:
        body = orjson.loads(raw)
    except orjson.JSONDecodeError as error:
        raise HttpError(f"the body is not valid JSON: {error}") from None
    if not isinstance(body, dict):
        raise HttpError("the body must be a JSON object")
    return body


Admission = Callable[[Exchange, Handler], None]


class App:
    """Routes by exact path and method. `admit`: called before each of them; raises HttpError."""

    def __init__(
        self,
        routes: Mapping[str, Mapping[str, Handler]],
        body_bytes: int = LIMITS["engine"].body_bytes,
        admit: Admission | None = None,
    ) -> None:
        self.routes = routes
        self._admit = admit
        self._body_bytes = body_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            raise RuntimeError(f"{scope['type']} is not served")
        exchange = Exchange(scope, receive, send, self._body_bytes)
        try:
            handler = self._handler(exchange)
            if self._admit is not None:
                self._admit(exchange, handler)
            await handler(exchange)
        except HttpError as error:
            await exchange.answer(error.body(), error.status)
        except Disconnected:
            return
        except Exception:
            logger.exception("%s %s failed", exchange.method, exchange.path)
            if exchange.started:
                raise
            await exchange.answer(HttpError("internal error", status=500).body(), 500)

    def _handler(self, exchange: Exchange) -> Handler:
        methods = self.routes.get(exchange.path)
        if methods is None:
            raise HttpError(f"no such path: {exchange.path}", status=404)
        handler = methods.get(exchange.method)
        if handler is None:
            raise HttpError(f"{exchange.path} allows {', '.join(sorted(methods))}", status=405)
        return handler
