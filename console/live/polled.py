"""Parts of a page that its script fetches again every few seconds, and how old what they show is.

The answer is JSON: `html` of the part, `charts` (absent where they are not due), `age_s` of the oldest of its figures
that move, `stale_after_s`, and `reason` where something is not known now. The first paint says the same, so that a page
that is never answered goes stale by itself.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

from django.http import HttpRequest, JsonResponse

from console.live import live_view
from controller.core.messages import FleetMessage
from workers import live

SHARED_S = 2.0  # one rendering for all who ask within so long
REDIS_AWAY = "Redis is away: loads are not known"
NOBODY = "No gateway reports: loads are not known"


@dataclass(frozen=True, slots=True)
class AsOf:
    """How old a part is: `at` epoch seconds, None where nothing is known; stale from `stale_after_s` on."""

    at: float | None
    stale_after_s: float
    reason: str = ""

    @property
    def said(self) -> dict[str, Any]:
        """As the script reads it."""
        age_s = None if self.at is None else max(0.0, time.time() - self.at)
        return {"age_s": age_s, "stale_after_s": self.stale_after_s, "reason": self.reason}


@dataclass(frozen=True, slots=True)
class FleetNow:
    """What gateways say of the fleet; those that have fallen silent are left out, and nobody's silence is hidden."""

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
        return FleetNow([], AsOf(time.time(), limit, NOBODY))
    return FleetNow(fresh, AsOf(min(fleet["at"] for fleet in fresh), limit))


@dataclass(frozen=True, slots=True)
class Part:
    """A rendered part, and its charts by name."""

    html: str
    as_of: AsOf
    charts: dict[str, Any] = field(default_factory=dict)

    def answer(self, charts_due: bool = False) -> JsonResponse:
        found: dict[str, Any] = {"html": self.html, **self.as_of.said}
        return JsonResponse(found | {"charts": self.charts} if charts_due else found)


def charts_due(request: HttpRequest) -> bool:
    """Lines of an hour do not move within seconds: the script asks for them now and then only."""
    return request.GET.get("charts") == "1"
