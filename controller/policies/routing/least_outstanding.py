"""Least outstanding: the instance with the fewest requests sent and not finished, queued or running; ties in turn."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from controller.core.policy import ROUTINGS, Stateless, WorkerView


@dataclass(frozen=True, slots=True)
class Config:
    """No settings."""


@ROUTINGS.register("least_outstanding")
class LeastOutstanding(Stateless):
    name: ClassVar[str] = "least_outstanding"

    def __init__(self, config: Config | None = None) -> None:
        self.config = config or Config()

    def choose(self, workers: Sequence[WorkerView], now: float) -> WorkerView | None:
        return min(workers, key=lambda w: (w.outstanding, w.last_sent, w.id), default=None)
