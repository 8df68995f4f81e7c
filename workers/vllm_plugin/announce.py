"""What a server tells gateways: `--middleware workers.vllm_plugin.announce.Announce`.

In `/metrics` that it reads their hints, and with the KV connector in each answer how its KV came. The scheduler has no
way to the server's HTTP side: it may run in another process. vLLM imports a middleware there.
"""

from __future__ import annotations

from typing import Any

from prometheus_client import Gauge

from workers.vllm_plugin.answers import KvInAnswers
from workers.vllm_plugin.hints import ANNOUNCED

Gauge(ANNOUNCED, "1 where Slackline's scheduler reads the hints of requests.").set(1)


class Announce:
    """An ASGI middleware; importing it registers the metric."""

    def __init__(self, app: Any) -> None:
        self._app = KvInAnswers(app)

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        await self._app(scope, receive, send)
