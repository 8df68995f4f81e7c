"""Earliest deadline first, by the time the first token is due (or the end-to-end deadline, if that is earlier).

The textbook rule (Liu and Layland 1973). It takes no notice of what can still be met: past capacity a request that has
already missed sorts first and the rest follow it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from controller.core.policy import ORDERINGS, Cost, Rank, Stateless
from controller.core.types import Request


@dataclass(frozen=True, slots=True)
class Config:
    """Nothing to set."""


def due(request: Request) -> float:
    """The first promise that falls due, on the driver's clock."""
    first = request.arrival + request.targets.ttft_s
    if request.targets.deadline_s is None:
        return first
    return min(first, request.arrival + request.targets.deadline_s)


@ORDERINGS.register("earliest_deadline_first")
class EarliestDeadlineFirst(Stateless):
    name: ClassVar[str] = "earliest_deadline_first"

    def __init__(self, config: Config | None = None) -> None:
        self.config = config or Config()

    def rank(self, request: Request, cost: Cost, now: float) -> Rank:
        return Rank((due(request), request.arrival))
