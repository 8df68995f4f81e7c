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


@ORDERINGS.register("earliest_deadline_first")
class EarliestDeadlineFirst(Stateless):
    name: ClassVar[str] = "earliest_deadline_first"

    def __init__(self, config: Config | None = None) -> None:
        self.config = config or Config()

    def rank(self, request: Request, cost: Cost, now: float) -> Rank:
        return Rank((request.due, request.arrival))
