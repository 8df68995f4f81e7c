"""Several gateways for one fleet: which share of each instance is this gateway's.

Each gateway reads the others' published state and computes the same split: a fifth of every instance in equal parts, so
that an idle gateway can start at once, the rest by open requests (queued and at engines). A gateway that published
nothing for three periods has no share. Alone, or with Redis unavailable from the start, a gateway has all of it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from controller.core.events import SharesChanged
from controller.core.messages import FleetMessage
from controller.core.staleness import STALE_PERIODS

EQUAL_PART = 0.2
SMALLEST_CHANGE = 0.02  # smaller ones are not passed on: every change makes the scheduler look at the whole fleet


class Shares:
    """`name`: this gateway's. Remembers what the scheduler was told."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._told: dict[str, float] = {}

    def of(self, messages: Iterable[FleetMessage], wall: float) -> float:
        """This gateway's share (0..1], from the newest message of each gateway, its own included."""
        open_by_gateway = {
            message["gateway"]: message["queued"] + message["in_flight"]
            for message in messages
            if wall - message["at"] <= STALE_PERIODS * max(1.0, message["period_s"])
        }
        open_by_gateway.setdefault(self._name, 0)
        count, total = len(open_by_gateway), sum(open_by_gateway.values())
        by_load = open_by_gateway[self._name] / total if total else 1 / count
        return EQUAL_PART / count + (1 - EQUAL_PART) * by_load

    def changes(self, share: float, instance_ids: Sequence[str]) -> list[SharesChanged]:
        """What the scheduler must be told: new instances, and those whose share changed. A share is 1 at first."""
        self._told = {name: self._told.get(name, 1.0) for name in instance_ids}
        moved = [name for name in instance_ids if self._moved(self._told[name], share)]
        self._told.update(dict.fromkeys(moved, share))
        return [SharesChanged(name, share) for name in moved]

    @staticmethod
    def _moved(told: float, share: float) -> bool:
        return abs(told - share) >= SMALLEST_CHANGE or (share == 1.0 != told)
