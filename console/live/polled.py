"""Parts of a page that its script fetches again every few seconds, with the age of their data.

The answer is JSON: `html` of the part, `charts` (only when they are due), `age_s` of its oldest live figure,
`stale_after_s`, and `reason` when something is unknown. The first paint carries the same age, so that a page
whose polls are never answered becomes stale on its own.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

from django.http import HttpRequest, JsonResponse

from console.live import live_view
from controller.core.messages import FleetMessage
from workers import live

SHARED_S = 2.0  # all pages that poll within this time share one rendering
REDIS_AWAY = "Redis is unavailable: load is unknown"
NO_GATEWAY = "No gateway is reporting: load is unknown"


@dataclass(frozen=True, slots=True)
class AsOf:
    """How old a part is: `at` in epoch seconds, None if nothing is known; stale after `stale_after_s` seconds."""

    at: float | None
    stale_after_s: float
    reason: str = ""

    @property
    def as_json(self) -> dict[str, Any]:
        """The values that static/js/poll.js reads."""
        age_s = None if self.at is None else max(0.0, time.time() - self.at)
        return {"age_s": age_s, "stale_after_s": self.stale_after_s, "reason": self.reason}


@dataclass(frozen=True, slots=True)
class FleetNow:
    """State of the gateways that report now; `as_of` says why when none does."""

    fleets: list[FleetMessage]
    as_of: AsOf


def fleet_now() -> FleetNow:
    try:
        published = live.read_fleet()
    except live.LiveUnavailable:
        return FleetNow([], AsOf(time.time(), 0.0, REDIS_AWAY))
    limit = live_view.stale_after_s(published)
    fresh = live_view.fresh(published, time.time())
    if not fresh:
        return FleetNow([], AsOf(time.time(), limit, NO_GATEWAY))
    return FleetNow(fresh, AsOf(min(fleet["at"] for fleet in fresh), limit))


@dataclass(frozen=True, slots=True)
class PagePart:
    """A rendered part, and its charts by name."""

    html: str
    as_of: AsOf
    charts: dict[str, Any] = field(default_factory=dict)

    def answer(self, charts_due: bool = False) -> JsonResponse:
        found: dict[str, Any] = {"html": self.html, **self.as_of.as_json}
        return JsonResponse(found | {"charts": self.charts} if charts_due else found)


def charts_due(request: HttpRequest) -> bool:
    """Charts of an hour hardly change within seconds: the script asks for them on every fifth poll only."""
    return request.GET.get("charts") == "1"
