"""Protects the endpoints that move KV or weights, or stop the engine: callers must know the fleet's token."""

from __future__ import annotations

import hmac
from collections.abc import Awaitable, Callable

from workers.engine import fields
from workers.engine.errors import HttpError
from workers.engine.http.asgi import Exchange, Handler

FleetHandler = Callable[[Exchange, fields.Body], Awaitable[None]]


def guarded(expected: str, handler: FleetHandler) -> Handler:
    """A handler that calls `handler` with the body if its `token` is `expected`. Otherwise the response is 403, before
    any other field is read."""

    async def check(exchange: Exchange) -> None:
        body = await exchange.json(empty=True)
        _check(expected, body)
        await handler(exchange, body)

    return check


def _check(expected: str, body: fields.Body) -> None:
    """Raises HttpError 403. An engine without a token accepts none."""
    token = fields.string(body, "token")
    if not expected:
        raise HttpError("this engine was started without FLEET_TOKEN", "token", status=403)
    if not hmac.compare_digest(token.encode(), expected.encode()):
        raise HttpError("the fleet's token is missing or wrong", "token", status=403)
