"""A bound on bodies in front of an ASGI application that has none. Django's handler writes a body of any size to disk
before a view, or a check of who asks, has run."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from workers.http.limits import HttpLimits

Message = MutableMapping[str, Any]
Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
Application = Callable[[Any, Any, Any], Awaitable[None]]  # each library has types of its own for the three

LONGEST_NUMBER = 18  # digits of a content-length; Python refuses to read a number with thousands of them


class _Refused(Exception):
    """More came than may come: more than was declared, or for all requests together."""

    def __init__(self, status: int) -> None:
        super().__init__()
        self.status = status


class BoundedBodies:
    """`limits.body_bytes` for each request; `limits.upload_bytes` for POSTs whose path begins with one of `uploads`;
    `limits.bodies_bytes` for all requests that are not answered yet, which Django keeps in memory or on disk.

    How long a body may take is the protocol's matter (`workers.http.protocol`)."""

    def __init__(self, application: Application, limits: HttpLimits, uploads: tuple[str, ...] = ()) -> None:
        self._application = application
        self._limits = limits
        self._uploads = uploads
        self.held = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        most = self._limits.body_bytes
        if self._uploads and scope["method"] == "POST" and scope["path"].startswith(self._uploads):
            most = self._limits.upload_bytes
        declared = next((value for name, value in scope["headers"] if name == b"content-length"), b"0")
        if len(declared) > LONGEST_NUMBER or (declared.isdigit() and int(declared) > most):
            await _refuse(send, 413, most)
            return
        size, started = 0, False

        async def bounded() -> Message:
            nonlocal size
            message = await receive()
            came = len(message.get("body", b""))
            size += came
            self.held += came
            if size > most:
                raise _Refused(413)
            if self.held > self._limits.bodies_bytes:
                raise _Refused(503)
            return message

        async def noted(message: Message) -> None:
            nonlocal started
            started = True
            await send(message)

        try:
            await self._application(scope, bounded, noted)
        except _Refused as refused:
            if not started:
                await _refuse(send, refused.status, most)
        finally:
            self.held -= size


async def _refuse(send: Send, status: int, most: int) -> None:
    code, message = "request_too_large", f"The request body may have at most {most} bytes."
    if status != 413:
        code, message = "no_capacity", "Too many large requests are being received. Try again."
    error = {"code": code, "message": message, "fields": {}}
    body = json.dumps({"error": error}).encode()
    headers = [
        (b"content-type", b"application/json"),
        (b"content-length", str(len(body)).encode()),
        (b"connection", b"close"),
    ]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
