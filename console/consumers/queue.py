"""Live Queue: every gateway's newest QueueMessage. Gateways publish it only while somebody watches."""

from __future__ import annotations

from typing import Any

import orjson

from console import live_view
from console.consumers.base import LiveConsumer
from console.consumers.shared import Shared
from controller.core.messages import LIVE_QUEUE, QUEUE_ROWS_PUBLISHED, QueueMessage
from workers import live

SHARED = Shared()
GONE_AFTER_S = 15.0


class QueueConsumer(LiveConsumer):
    topic = "queue"
    group = LIVE_QUEUE

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._queues: dict[str, QueueMessage] = {}

    async def mark_watched(self) -> None:
        await live.amark_watched(self.group)

    async def refresh(self) -> None:
        for message in await live.aread_queue():
            self._keep(message)

    def take(self, message: dict[str, Any]) -> bool:
        return self._keep(message["data"])  # type: ignore[arg-type]

    def _keep(self, message: QueueMessage) -> bool:
        known = self._queues.get(message["gateway"])
        if known is not None and known["at"] >= message["at"]:
            return False
        self._queues[message["gateway"]] = message
        return True

    def frame(self, snapshot: bool) -> orjson.Fragment:
        newest = max((message["at"] for message in self._queues.values()), default=0.0)
        present = [message for message in self._queues.values() if message["at"] > newest - GONE_AFTER_S]
        key = tuple((message["gateway"], message["at"], message["seq"]) for message in present)
        return SHARED.get(key, lambda: live_view.queue(present, QUEUE_ROWS_PUBLISHED))

    def age_s(self, now: float) -> float | None:
        newest = max((message["at"] for message in self._queues.values()), default=None)
        return None if newest is None else max(0.0, now - newest)
