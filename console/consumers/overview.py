"""Live Overview: every gateway's newest FleetMessage, merged into one page."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Any

import orjson

from console.consumers.base import LiveConsumer
from console.live import live_view
from controller.core.messages import LIVE_OVERVIEW, FleetMessage
from workers import live

GONE_AFTER_S = 15.0  # a gateway silent for this long is dropped from the page
KEPT = 4  # sockets may be a few states apart


class Shared:
    """A state shown to many browsers is shaped and serialised to JSON once. For use on one event loop.

    It keeps the newest states of one topic, by the key that they were made from.
    """

    def __init__(self, kept: int = KEPT) -> None:
        self._kept = kept
        self._made: OrderedDict[Hashable, orjson.Fragment] = OrderedDict()

    def get(self, key: Hashable, make: Callable[[], Any]) -> orjson.Fragment:
        found = self._made.get(key)
        if found is None:
            found = self._made[key] = orjson.Fragment(orjson.dumps(make()))
            while len(self._made) > self._kept:
                self._made.popitem(last=False)
        return found


SHARED = Shared()


class OverviewConsumer(LiveConsumer):
    topic = "overview"
    group = LIVE_OVERVIEW

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._fleets: dict[str, FleetMessage] = {}

    async def mark_watched(self) -> None:
        await live.amark_watched(self.group)

    async def refresh(self) -> None:
        published = await live.aread_fleet()
        for fleet in published:
            self._keep(fleet)
        self._forget_all_but({fleet["gateway"] for fleet in published})

    def take(self, message: dict[str, Any]) -> bool:
        return self._keep(message["data"])

    def _keep(self, fleet: FleetMessage) -> bool:
        """Takes a message if it is newer (by `at`): it may arrive after the same state was read from Redis.

        Keeps gateways heard from lately, and the newest one in any case: stale data marked as stale beats an empty
        page. A page may stay open for days while many gateways come and go.
        """
        known = self._fleets.get(fleet["gateway"])
        newest = max((each["at"] for each in self._fleets.values()), default=0.0)
        if (known is not None and known["at"] >= fleet["at"]) or fleet["at"] <= newest - GONE_AFTER_S:
            return False
        self._fleets[fleet["gateway"]] = fleet
        for name in [name for name, each in self._fleets.items() if each["at"] <= fleet["at"] - GONE_AFTER_S]:
            del self._fleets[name]
        return True

    def _forget_all_but(self, published: set[str]) -> None:
        """Drops gateways that Redis no longer holds: they stopped or hang, and their figures are out of date."""
        newest = max((each["at"] for each in self._fleets.values()), default=0.0)
        silent = newest - self.stale_after_s()
        for name in [name for name, each in self._fleets.items() if name not in published and each["at"] < silent]:
            del self._fleets[name]

    def frame(self, snapshot: bool) -> orjson.Fragment:
        present = list(self._fleets.values())
        key = tuple((fleet["gateway"], fleet["at"], fleet["seq"]) for fleet in present)
        return SHARED.get(key, lambda: live_view.overview(present))

    def age_s(self, now: float) -> float | None:
        newest = max((fleet["at"] for fleet in self._fleets.values()), default=None)
        return None if newest is None else max(0.0, now + live.ahead_s() - newest)

    def stale_after_s(self) -> float:
        return live_view.stale_after_s(self._fleets.values())
