"""HyperFlexis Alg. 1: the worker with the earliest maturity time; ties by fewest outstanding requests, then in turn."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from controller.core.policy import ROUTINGS, Stateless, WorkerView


@dataclass(frozen=True, slots=True)
class Config:
    """No settings."""


@ROUTINGS.register("earliest_maturity")
class EarliestMaturity(Stateless):
    name: ClassVar[str] = "earliest_maturity"

    def __init__(self, config: Config | None = None) -> None:
        self.config = config or Config()

    def choose(self, workers: Sequence[WorkerView], now: float) -> WorkerView | None:
        return min(workers, key=lambda w: (max(w.mature_at, now), w.outstanding, w.last_sent, w.id), default=None)
