"""Live state published by gateways. Anything older than three publishing periods is left out as stale."""

from __future__ import annotations

import time

from api.errors import LiveDataUnavailable
from controller.core.messages import FleetMessage
from controller.core.staleness import is_fresh
from workers import live


def fresh_fleets() -> list[FleetMessage]:
    """At least one; raises LiveDataUnavailable when no gateway has published lately."""
    now = time.time()
    fresh = [fleet for fleet in live.read_fleet() if is_fresh(fleet["at"], fleet["period_s"], now)]
    if not fresh:
        raise LiveDataUnavailable
    return fresh
