"""Who may tell an engine to move KV or weights, or to stop serving: whoever knows the fleet's token."""

from __future__ import annotations

import hmac
from collections.abc import Awaitable, Callable

from workers.engine import fields
from workers.engine.errors import HttpError
from workers.engine.http.asgi import Exchange, Handler

FleetHandler = Callable[[Exchange, fields.Body], Awaitable[None]]


def guarded(expected: str, handler: FleetHandler) -> Handler:
    """`handler` gets the body of those who know the token `expected`; others get 403, before anything else is read."""

    async def check(exchange: Exchange) -> None:
        body = await exchange.json(empty=True)
        _check(expected, body)
        await handler(exchange, body)

    return check


def _check(expected: str, body: fields.Body) -> None:
    """Without a token of its own the engine takes nobody's."""
    token = fields.string(body, "token")
    if not expected:
        raise HttpError("this engine knows no token of a fleet: start it with FLEET_TOKEN", "token", status=403)
    if not hmac.compare_digest(token.encode(), expected.encode()):
        raise HttpError("the fleet's token is missing or wrong", "token", status=403)
