"""ASGI as the data path uses it: types, bodies read, responses sent."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Iterable, MutableMapping
from typing import Any

from api.openai.protocol.errors import ApiError
from workers.http.limits import LIMITS

Message = MutableMapping[str, Any]
Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
Header = tuple[bytes, bytes]

MAX_BODY_BYTES = LIMITS["gateway"].body_bytes
LARGE_BYTES = 64 << 10  # as much as the server reads ahead
# A connection closed while its client still writes is reset, and the reset may overtake the answer.
LINGER_S = 2.0
LINGER_BYTES = 64 << 20
JSON = (b"content-type", b"application/json")
EVENT_STREAM = (b"content-type", b"text/event-stream; charset=utf-8")
NO_CACHE = (b"cache-control", b"no-cache")
_CLOSE = (b"connection", b"close")


async def respond(
    send: Send, status: int, body: bytes, headers: Iterable[Header] = (), content_type: Header = JSON
) -> None:
    length = (b"content-length", str(len(body)).encode())
    await send({"type": "http.response.start", "status": status, "headers": [content_type, length, *headers]})
    await send({"type": "http.response.body", "body": body})


async def respond_error(send: Send, error: ApiError, headers: Iterable[Header] = ()) -> None:
    closing = [_CLOSE] if error.status == 413 else []  # the rest of the body is not read
    await respond(send, error.status, error.body(), [*headers, *error.headers(), *closing])


async def refuse_body(send: Send, receive: Receive, error: ApiError) -> None:
    """Answer at once, then read and drop what the client still sends, for a while, before the connection closes."""
    body = error.body()
    length = (b"content-length", str(len(body)).encode())
    await send({"type": "http.response.start", "status": error.status, "headers": [JSON, length, _CLOSE]})
    await send({"type": "http.response.body", "body": body, "more_body": True})
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(LINGER_S):
            dropped = 0
            while dropped < LINGER_BYTES:
                message = await receive()
                dropped += len(message.get("body", b""))
                if not message.get("more_body"):
                    break
    await send({"type": "http.response.body", "body": b""})


def header(scope: Scope, name: bytes) -> bytes | None:
    for key, value in scope["headers"]:
        if key == name:
            return value
    return None


class ClientGone(Exception):
    """The client hung up before its request was complete."""


async def read_body(
    scope: Scope,
    receive: Receive,
    most: int = MAX_BODY_BYTES,
    count: Callable[[int], None] = lambda size: None,
    turns: Callable[[], asyncio.Semaphore] | None = None,
) -> bytes | bytearray:
    """The whole body. Raises ApiError beyond `most` bytes, before reading where the length is declared. How long it may
    take is the protocol's matter (`workers.http.protocol`). `count` hears how many bytes came, and may raise.

    A large body waits for one of `turns` after `LARGE_BYTES`; its client is not read meanwhile. A pass of the loop
    reads from each client that has sent something, so everybody else waits for as long as those take together."""
    declared = header(scope, b"content-length")
    # The count of digits first: Python refuses to read a number with thousands of them.
    if declared is not None and declared.isdigit() and (len(declared) > 18 or int(declared) > most):
        raise _too_large(most)
    turn: asyncio.Semaphore | None = None
    whole = bytearray()  # not a list of parts, which would be in memory twice while they are joined
    try:
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                raise ClientGone
            part = message.get("body", b"")
            if len(whole) + len(part) > most:
                raise _too_large(most)
            count(len(part))
            if not whole and not message.get("more_body"):
                return bytes(part)
            whole += part
            if not message.get("more_body"):
                return whole
            if turns is not None and turn is None and len(whole) > LARGE_BYTES:
                waited = turns()
                await waited.acquire()
                turn = waited
    finally:
        if turn is not None:
            turn.release()


def _too_large(most: int) -> ApiError:
    return ApiError("request_too_large", f"The request body may have at most {most} bytes.")
