"""Earliest deadline first, by the time the first token is due (or the end-to-end deadline, if that is earlier).

The textbook rule (Liu and Layland 1973). It ignores whether a deadline can still be met: under overload, requests that
have already missed theirs go first and make the others miss too.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from controller.core.policy import ORDERINGS, Cost, Rank, Stateless
from controller.core.types import Request


@dataclass(frozen=True, slots=True)
class Config:
    """No settings."""


def due(request: Request) -> float:
    """The earliest target time of the request, on the driver's clock."""
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
