"""Combines the attainment windows of several gateways, each of which measured its own requests."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from controller.core.messages import ClassWindow, FleetMessage

COUNTS = ("finished", "attained", "ttft_met", "tpot_met", "refused", "failed", "cancelled", "goodput_tokens", "queued")
SAMPLES = ("sampled", "first_tokens", "in_one_piece")  # absent unless every gateway has it
WEIGHTS = {"ttft_p50_s": "first_tokens", "ttft_p95_s": "first_tokens", "tpot_p50_s": "finished"}


def merged_windows(fleets: Iterable[FleetMessage]) -> list[ClassWindow]:
    """One row for each class of each tenant, sorted by name.

    Counts are sums, the slack is the smallest, and the cause of misses comes from the gateway with the most misses.
    Latencies are weighted by their number of requests: exact for one gateway, an estimate for several, since quantiles
    cannot be added.
    """
    found: dict[tuple[str, str], ClassWindow] = {}
    for fleet in fleets:
        for window in fleet["classes"]:
            key = (window["tenant"], window["slo_class"])
            found[key] = _added(found[key], window) if key in found else window
    return [found[key] for key in sorted(found)]


def _added(left: ClassWindow, right: ClassWindow) -> ClassWindow:
    total: dict[str, Any] = {**left}
    for name in COUNTS:
        total[name] = left[name] + right[name]  # type: ignore[literal-required]
    for name in SAMPLES:
        total.pop(name, None)
        if name in left and name in right:
            total[name] = left[name] + right[name]  # type: ignore[literal-required]
    for name, weight in WEIGHTS.items():
        told = weight if weight in left and weight in right else "finished"
        total[name] = _weighted(left, right, name, told)
    slacks = [one["oldest_slack_s"] for one in (left, right) if one["oldest_slack_s"] is not None]
    total["oldest_slack_s"] = min(slacks, default=None)
    worse = max(left, right, key=lambda one: one["finished"] - one["attained"])
    total["miss_reason"] = worse["miss_reason"] or left["miss_reason"] or right["miss_reason"]
    return total  # type: ignore[return-value]


def _weighted(left: ClassWindow, right: ClassWindow, name: str, weight: str) -> float | None:
    parts = [(one[name], one[weight]) for one in (left, right) if one[name] is not None]  # type: ignore[literal-required]
    requests = sum(count for _, count in parts)
    return sum(value * count for value, count in parts) / requests if requests else next((v for v, _ in parts), None)
