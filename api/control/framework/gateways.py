"""The live state that gateways publish, without states that are stale."""

from __future__ import annotations

import time

from api.control.framework.errors import LiveDataUnavailable
from controller.core.messages import FleetMessage
from controller.core.staleness import is_fresh
from workers import live


def fresh_fleets() -> list[FleetMessage]:
    """The state of each gateway that is not stale. Raises LiveDataUnavailable if there is none."""
    now = time.time()
    fresh = [fleet for fleet in live.read_fleet() if is_fresh(fleet["at"], fleet["period_s"], now)]
    if not fresh:
        raise LiveDataUnavailable
    return fresh
