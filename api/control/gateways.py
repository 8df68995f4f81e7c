"""What gateways publish, merged over gateways. What is older than three periods is not shown as now."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Any

from api.errors import LiveDataUnavailable
from controller.core.messages import ClassWindow, FleetMessage
from workers import live

STALE_PERIODS = 3
STALE_AT_LEAST_S = 3.0  # a period of 50 ms does not make a late message stale
COUNTS = ("finished", "attained", "ttft_met", "tpot_met", "refused", "failed", "cancelled", "goodput_tokens", "queued")
QUANTILES = ("ttft_p50_s", "ttft_p95_s", "tpot_p50_s")


def fresh_fleets() -> list[FleetMessage]:
    """At least one; raises LiveDataUnavailable when no gateway has published lately."""
    now = time.time()
    fresh = [fleet for fleet in live.read_fleet() if is_fresh(fleet["at"], fleet["period_s"], now)]
    if not fresh:
        raise LiveDataUnavailable
    return fresh


def is_fresh(at: float, period_s: float, now: float) -> bool:
    return now - at <= max(STALE_AT_LEAST_S, STALE_PERIODS * period_s)


def merged_windows(fleets: Iterable[FleetMessage]) -> list[ClassWindow]:
    """One row for each class of each tenant: counts add up, latencies are weighted by requests."""
    found: dict[tuple[str, str], ClassWindow] = {}
    for fleet in fleets:
        for window in fleet["classes"]:
            key = (window["tenant"], window["slo_class"])
            found[key] = _sum(found[key], window) if key in found else window
    return [found[key] for key in sorted(found)]


def _sum(left: ClassWindow, right: ClassWindow) -> ClassWindow:
    total: dict[str, Any] = {**left, **{name: left[name] + right[name] for name in COUNTS}}  # type: ignore[literal-required]
    for name in QUANTILES:
        total[name] = _weighted(left, right, name)
    slacks = [one["oldest_slack_s"] for one in (left, right) if one["oldest_slack_s"] is not None]
    total["oldest_slack_s"] = min(slacks, default=None)
    worse = max(left, right, key=lambda one: one["finished"] - one["attained"])
    total["miss_reason"] = worse["miss_reason"] or left["miss_reason"] or right["miss_reason"]
    return total  # type: ignore[return-value]


def _weighted(left: ClassWindow, right: ClassWindow, name: str) -> float | None:
    """Exact for one gateway; over several an estimate, since quantiles do not add."""
    parts = [(one[name], one["finished"]) for one in (left, right) if one[name] is not None]  # type: ignore[literal-required]
    weight = sum(count for _, count in parts)
    return sum(value * count for value, count in parts) / weight if weight else next((v for v, _ in parts), None)
