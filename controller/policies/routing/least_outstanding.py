"""Least outstanding: the instance with the fewest requests sent and not finished, queued or running; ties in turn."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from controller.core.policy import ROUTINGS, InstanceView, Stateless


@dataclass(frozen=True, slots=True)
class Config:
    """No settings."""


@ROUTINGS.register("least_outstanding")
class LeastOutstanding(Stateless):
    name: ClassVar[str] = "least_outstanding"

    def __init__(self, config: Config | None = None) -> None:
        self.config = config or Config()

    def choose(self, instances: Sequence[InstanceView], now: float) -> InstanceView | None:
        return min(instances, key=lambda each: (each.outstanding, each.last_sent, each.id), default=None)
