"""What gateways publish. What is older than three periods is not shown as now."""

from __future__ import annotations

import time

from api.errors import LiveDataUnavailable
from controller.core.messages import FleetMessage
from workers import live

STALE_PERIODS = 3
STALE_AT_LEAST_S = 3.0  # a period of 50 ms does not make a late message stale


def fresh_fleets() -> list[FleetMessage]:
    """At least one; raises LiveDataUnavailable when no gateway has published lately."""
    now = time.time()
    fresh = [fleet for fleet in live.read_fleet() if is_fresh(fleet["at"], fleet["period_s"], now)]
    if not fresh:
        raise LiveDataUnavailable
    return fresh


def is_fresh(at: float, period_s: float, now: float) -> bool:
    return now - at <= max(STALE_AT_LEAST_S, STALE_PERIODS * period_s)
