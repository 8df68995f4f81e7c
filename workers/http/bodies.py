"""A bound on bodies in front of an ASGI application that has none. Django's handler writes a body of any size to disk
before a view, or a check of who asks, has run."""

from __future__ import annotations

import asyncio
import json
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from workers.http.limits import HttpLimits
from workers.http.protocol import address_of

log = logging.getLogger(__name__)

Message = MutableMapping[str, Any]
Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
Application = Callable[[Any, Any, Any], Awaitable[None]]  # each library has types of its own for the three
Knows = Callable[[Scope], Awaitable[bool]]

LONGEST_NUMBER = 18  # digits of a content-length; Python refuses to read a number with thousands of them
# A body of this size always has room, so that nobody can keep people from signing in. `limits.connections` bounds how
# many of them there can be.
SMALL_BYTES = 16 << 10
UNKNOWN_SHARE = 3 / 4  # of `bodies_bytes`, for all who have not proved who they are; the rest is for those who have
ADDRESS_SHARE = 1 / 8  # of `bodies_bytes`, for unknown callers of one address
KNOWN_ADDRESS_SHARE = 1 / 2  # the same for people and service accounts, of whom many can share an address


async def nobody(scope: Scope) -> bool:
    return False


class _Refused(Exception):
    """More came than may come: more than was declared, or for all requests together; or it came too late."""

    def __init__(self, status: int) -> None:
        super().__init__()
        self.status = status


class BoundedBodies:
    """`limits.body_bytes` for each request; `limits.upload_bytes` for POSTs whose path begins with one of `uploads`,
    from callers that `knows` knows; `limits.bodies_bytes`, in the shares above, for all requests that are not answered
    yet, which Django keeps in memory or on disk.

    `knows`: whether a request shows a session or token that is valid. It is asked only where the answer matters.

    How long a body may take is the protocol's matter (`workers.http.protocol`), which gives the time of an upload by
    its path alone; an upload of an unknown caller gets the time of other bodies here."""

    def __init__(
        self, application: Application, limits: HttpLimits, uploads: tuple[str, ...] = (), knows: Knows = nobody
    ) -> None:
        self._application = application
        self._limits = limits
        self._uploads = uploads
        self._knows = knows
        self.held = 0
        self.by_address: Counter[str] = Counter()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        upload = bool(self._uploads) and scope["method"] == "POST" and scope["path"].startswith(self._uploads)
        body = _Body(self, scope, receive, await self._known(scope) if upload else None, upload)
        most = body.most
        declared = next((value for name, value in scope["headers"] if name == b"content-length"), b"0")
        if len(declared) > LONGEST_NUMBER or (declared.isdigit() and int(declared) > most):
            await _refuse(send, 413, self._limits, most)
            return
        started = False

        async def noted(message: Message) -> None:
            nonlocal started
            started = True
            await send(message)

        try:
            await self._application(scope, body.receive, noted)
        except _Refused as refused:
            if not started:
                await _refuse(send, refused.status, self._limits, most)
        finally:
            body.release()

    async def _known(self, scope: Scope) -> bool:
        try:
            return await self._knows(scope)
        except Exception:  # the database is unavailable, say: a caller that cannot be recognised is unknown
            log.warning("a caller cannot be recognised", exc_info=True, extra={"action": "caller_unknown"})
            return False

    def room_for(self, address: str, known: bool) -> bool:
        """Whether what is held now is within the shares of a caller from this address."""
        all_share, address_share = (1.0, KNOWN_ADDRESS_SHARE) if known else (UNKNOWN_SHARE, ADDRESS_SHARE)
        most = self._limits.bodies_bytes
        return self.held <= most * all_share and self.by_address[address] <= most * address_share

    async def admits(self, scope: Scope, address: str, known: bool | None) -> bool | None:
        """Whether the caller is known, as far as it had to be found out. Raises _Refused without room for it."""
        if self.room_for(address, bool(known)):
            return known
        if known is None and await self._known(scope) and self.room_for(address, True):
            return True
        raise _Refused(503)


class _Body:
    """The body of one request while it is held."""

    def __init__(self, bounds: BoundedBodies, scope: Scope, receive: Receive, known: bool | None, upload: bool) -> None:
        limits = bounds._limits
        self._bounds, self._scope, self._receive, self._known = bounds, scope, receive, known
        self._address = address_of(scope.get("client"))
        self._size = 0
        self.most = limits.upload_bytes if upload and known else limits.body_bytes
        hasty = upload and not known
        self._due = asyncio.get_running_loop().time() + limits.body_s if hasty else None

    async def receive(self) -> Message:
        message = await self._next()
        came = len(message.get("body", b""))
        self._size += came
        self._bounds.held += came
        self._bounds.by_address[self._address] += came
        if self._size > self.most:
            raise _Refused(413)
        if came and self._size > SMALL_BYTES:
            self._known = await self._bounds.admits(self._scope, self._address, self._known)
        if not message.get("more_body"):
            self._due = None  # the body is whole; what is awaited from now on is the end of the connection
        return message

    async def _next(self) -> Message:
        try:
            async with asyncio.timeout_at(self._due):
                return await self._receive()
        except TimeoutError:
            raise _Refused(408) from None

    def release(self) -> None:
        self._bounds.held -= self._size
        self._bounds.by_address[self._address] -= self._size
        if not self._bounds.by_address[self._address]:
            del self._bounds.by_address[self._address]


async def _refuse(send: Send, status: int, limits: HttpLimits, most: int) -> None:
    code, message = {
        408: ("request_timeout", f"The request body did not arrive within {limits.body_s:g} seconds."),
        413: ("request_too_large", f"The request body may have at most {most} bytes."),
        503: ("no_capacity", "Too many large requests are being received. Try again."),
    }[status]
    error = {"code": code, "message": message, "fields": {}}
    body = json.dumps({"error": error}).encode()
    headers = [
        (b"content-type", b"application/json"),
        (b"content-length", str(len(body)).encode()),
        (b"connection", b"close"),
    ]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
