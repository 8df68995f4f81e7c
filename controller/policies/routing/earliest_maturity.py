"""HyperFlexis Alg. 1: the instance with the earliest maturity; ties by fewest outstanding requests, then in turn."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from controller.core.policy import ROUTINGS, InstanceView, Stateless


@dataclass(frozen=True, slots=True)
class Config:
    """No settings."""


@ROUTINGS.register("earliest_maturity")
class EarliestMaturity(Stateless):
    name: ClassVar[str] = "earliest_maturity"

    def __init__(self, config: Config | None = None) -> None:
        self.config = config or Config()

    def choose(self, instances: Sequence[InstanceView], now: float) -> InstanceView | None:
        return min(
            instances,
            key=lambda each: (max(each.mature_at, now), each.outstanding, each.last_sent, each.id),
            default=None,
        )
