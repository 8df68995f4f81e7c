"""Round robin: the instance to which a request was sent least recently."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from controller.core.policy import ROUTINGS, Stateless, WorkerView


@dataclass(frozen=True, slots=True)
class Config:
    """No settings."""


@ROUTINGS.register("round_robin")
class RoundRobin(Stateless):
    name: ClassVar[str] = "round_robin"

    def __init__(self, config: Config | None = None) -> None:
        self.config = config or Config()

    def choose(self, workers: Sequence[WorkerView], now: float) -> WorkerView | None:
        return min(workers, key=lambda w: (w.last_sent, w.id), default=None)
