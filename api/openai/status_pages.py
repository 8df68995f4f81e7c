"""/livez, /healthz and /metrics of a gateway: who may read which part, and for how long an answer is kept."""

from __future__ import annotations

import time
from collections.abc import Callable

import orjson

from api.openai.asgi import Scope, Send, header, respond, respond_error
from api.openai.gateway import Gateway
from api.openai.protocol.errors import ApiError
from api.openai.status import health, metrics
from workers.http.details import KEPT_S, LIVE, MISSING, calls_by_address, may_read, was_forwarded

Page = tuple[int, bytes]
PATHS = frozenset({LIVE, "/healthz", "/metrics"})
_PLAIN = (b"content-type", b"text/plain; version=0.0.4; charset=utf-8")
_ASK = (b"www-authenticate", b'Bearer realm="slackline"')


class StatusPages:
    """`clock`: seconds, monotonic."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._kept: dict[str, tuple[float, Page]] = {}

    async def live(self, send: Send) -> None:
        """The process runs. Needs no gateway."""
        await respond(send, 200, b"ok\n", content_type=_PLAIN)

    async def answer(self, gateway: Gateway, scope: Scope, send: Send) -> None:
        """/healthz, of which everybody gets the status, and /metrics."""
        names = {name for name, _ in scope["headers"]}
        peer = scope.get("client")
        allowed = may_read(
            gateway.options.metrics_token,
            header(scope, b"authorization") or b"",
            peer[0] if peer else None,
            forwarded=was_forwarded(names) or not calls_by_address(header(scope, b"host")),
        )
        if scope["path"] == "/healthz":
            status, body = self._page("/healthz", lambda: _health(gateway))
            if not allowed:  # load balancers need the status; names of tenants and instances are nobody else's
                body = orjson.dumps({"status": orjson.loads(body)["status"]})
            await respond(send, status, body)
        elif allowed:
            status, body = self._page("/metrics", lambda: (200, metrics(gateway)))
            await respond(send, status, body, content_type=_PLAIN)
        else:
            await respond_error(send, ApiError("invalid_api_key", MISSING), [_ASK])

    def _page(self, path: str, make: Callable[[], Page]) -> Page:
        now = self._clock()
        kept = self._kept.get(path)
        if kept is None or now - kept[0] >= KEPT_S:
            kept = self._kept[path] = (now, make())
        return kept[1]


def _health(gateway: Gateway) -> Page:
    status, body = health(gateway)
    return status, orjson.dumps(body)
