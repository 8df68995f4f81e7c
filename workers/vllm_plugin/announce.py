"""Says in `/metrics` that this server reads a gateway's hints: `--middleware workers.vllm_plugin.announce.Announce`.

The scheduler has no way to the server's HTTP side: it may run in another process. vLLM imports a middleware there.
"""

from __future__ import annotations

from typing import Any

from prometheus_client import Gauge

from workers.vllm_plugin.hints import ANNOUNCED

Gauge(ANNOUNCED, "1 where Slackline's scheduler reads the hints of requests.").set(1)


class Announce:
    """An ASGI middleware that changes nothing; importing it registers the metric."""

    def __init__(self, app: Any) -> None:
        self._app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        await self._app(scope, receive, send)
