"""HyperFlexis' queue order (Alg. 1): the tightest TPOT first, then arrival."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from controller.core.policy import ORDERINGS, Cost, Rank, Stateless
from controller.core.types import Request


@dataclass(frozen=True, slots=True)
class Config:
    """No settings."""


@ORDERINGS.register("tpot_then_arrival")
class TpotThenArrival(Stateless):
    name: ClassVar[str] = "tpot_then_arrival"

    def __init__(self, config: Config | None = None) -> None:
        self.config = config or Config()

    def rank(self, request: Request, cost: Cost, now: float) -> Rank:
        return Rank((request.targets.tpot_s, request.arrival))
