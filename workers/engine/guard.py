"""Who may tell an engine to move weights or to stop serving: whoever knows the fleet's token."""

from __future__ import annotations

import hmac

from workers.engine import fields
from workers.engine.errors import ApiError


def check_token(expected: str, body: fields.Body) -> None:
    """Raises ApiError (403) where `token` is not the fleet's; without one of its own the engine takes nobody's."""
    token = fields.string(body, "token")
    if not expected:
        raise ApiError("this engine knows no token of a fleet: start it with FLEET_TOKEN", "token", status=403)
    if not hmac.compare_digest(token.encode(), expected.encode()):
        raise ApiError("the fleet's token is missing or wrong", "token", status=403)
