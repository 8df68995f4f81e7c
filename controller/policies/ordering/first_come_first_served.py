"""First come, first served: in order of arrival."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from controller.core.policy import ORDERINGS, Cost, Rank, Stateless
from controller.core.types import Request


@dataclass(frozen=True, slots=True)
class Config:
    """No settings."""


@ORDERINGS.register("first_come_first_served")
class FirstComeFirstServed(Stateless):
    name: ClassVar[str] = "first_come_first_served"

    def __init__(self, config: Config | None = None) -> None:
        self.config = config or Config()

    def rank(self, request: Request, cost: Cost, now: float) -> Rank:
        return Rank((request.arrival,))
