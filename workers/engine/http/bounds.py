"""`/bounds`: bounds of answers that run here, as the gateway predicts them again while they grow."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter

from controller.core.told_hints import MOST_TOKENS
from workers.engine import fields
from workers.engine.engine import Engine
from workers.engine.errors import HttpError
from workers.engine.http.asgi import Exchange, Handler
from workers.engine.http.guard import FleetGuard

MOST_REQUESTS = 10_000


class BoundEndpoints:
    """Only the fleet may say how long an answer is: who waits for a slot depends on it."""

    def __init__(self, engine: Engine, guard: FleetGuard, registry: CollectorRegistry) -> None:
        self._engine = engine
        self._guard = guard
        text = "Bounds of running answers that the gateway refined, since the start."
        self._told = Counter("slackline_length_bounds_told", text, registry=registry)

    def routes(self) -> dict[str, dict[str, Handler]]:
        return {"/bounds": {"POST": self._guard(self.tell)}}

    async def tell(self, exchange: Exchange, body: fields.Body) -> None:
        """`bounds`: by the id of a request as its client sent it, its lower and upper bound in tokens. Requests that
        ended meanwhile, or came without bounds and deadline, are ignored."""
        told = self._engine.tell_bounds(parse_bounds(body))
        self._told.inc(told)
        await exchange.reply({"told": told})


def parse_bounds(body: fields.Body) -> dict[str, tuple[int, int]]:
    """Raises HttpError, and then none of them counts."""
    found = fields.mapping(body, "bounds")
    if len(found) > MOST_REQUESTS:
        raise HttpError(f"bounds may name at most {MOST_REQUESTS} requests, got {len(found)}", "bounds")
    bounds = {}
    for name, pair in found.items():
        whole = isinstance(pair, list) and len(pair) == 2 and all(type(each) is int for each in pair)
        if not whole or not 0 <= pair[0] <= pair[1] <= MOST_TOKENS:
            raise HttpError("bounds must hold a lower and an upper number of tokens for each request", "bounds")
        bounds[name] = (pair[0], pair[1])
    return bounds
