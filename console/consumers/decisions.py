"""Live decisions: the newest of the audit as a snapshot, then each new one."""

from __future__ import annotations

from collections import deque
from typing import Any

from channels.db import database_sync_to_async

from console.consumers.base import LiveConsumer
from controller.core.decisions import DecisionMessage
from controller.core.messages import LIVE_DECISIONS
from controller.selectors.records import decisions as selectors
from controller.wording.sentences import message_of
from workers import live

SHOWN = 40  # of a longer burst the list shows the end; the audit has all of it


class DecisionsConsumer(LiveConsumer):
    topic = "decisions"
    group = LIVE_DECISIONS

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._items: deque[DecisionMessage] = deque(maxlen=SHOWN)  # newest first
        self._unsent: deque[DecisionMessage] = deque(maxlen=SHOWN)

    async def mark_watched(self) -> None:
        await live.amark_watched(self.group)

    async def refresh(self) -> None:
        """Recovers, within seconds, decisions whose messages were lost: all decisions are in the database."""
        for item in reversed(await newest_items()):
            self._keep(item)

    def take(self, message: dict[str, Any]) -> bool:
        return self._keep(message["data"])

    def _keep(self, item: DecisionMessage) -> bool:
        if any(known["id"] == item["id"] for known in self._items):
            return False
        self._items.appendleft(item)
        self._unsent.appendleft(item)
        return True

    def frame(self, snapshot: bool) -> dict[str, Any]:
        items = list(self._items if snapshot else self._unsent)
        self._unsent.clear()
        return {"decisions": sorted(items, key=lambda item: item["at"])}

    def age_s(self, now: float) -> float | None:
        return 0.0  # decisions have no period: the list is current as long as Redis is connected


@database_sync_to_async
def newest_items() -> list[DecisionMessage]:
    return [message_of(decision) for decision in selectors.newest(SHOWN)]
