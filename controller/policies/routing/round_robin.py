"""Round robin: the instance to which a request was sent least recently."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from controller.core.policy import ROUTINGS, InstanceView, Stateless


@dataclass(frozen=True, slots=True)
class Config:
    """No settings."""


@ROUTINGS.register("round_robin")
class RoundRobin(Stateless):
    name: ClassVar[str] = "round_robin"

    def __init__(self, config: Config | None = None) -> None:
        self.config = config or Config()

    def choose(self, instances: Sequence[InstanceView], now: float) -> InstanceView | None:
        return min(instances, key=lambda each: (each.last_sent, each.id), default=None)
