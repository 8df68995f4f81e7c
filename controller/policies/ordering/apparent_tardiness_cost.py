"""Urgency and worth in one static key: the apparent tardiness cost rule.

Vepsalainen and Morton, "Priority rules for job shops with weighted tardiness costs", Management Science 33 (1987):
index = (value / service time) x exp(-slack / lookahead). Between two requests that can still be in time, "now" cancels
out of the comparison, so each request has a constant key:

    key = latest start / lookahead + ln(service time / value)      (smaller first)

A short lookahead is earliest deadline first; a long one is Concord's goodput per second of generation (eq. 4.1). In
between, a cheap request overtakes an expensive one unless the latter's deadline is nearer by `lookahead x ln(cost
ratio)` seconds. Under overload this spends capacity where it attains most. Requests that can no longer be in time are
handled by the admission policy. Cost per decision: O(1).

`lookahead_s` (10): 2, 10 and 30 were tried on the HyperFlexis mixes (decision 2).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

from controller.core.errors import ConfigError
from controller.core.policy import ORDERINGS, Cost, Rank, Stateless
from controller.core.types import Request


@dataclass(frozen=True, slots=True)
class Config:
    lookahead_s: float = 10.0

    def __post_init__(self) -> None:
        if not self.lookahead_s > 0:
            raise ConfigError("lookahead_s must be positive seconds", field="lookahead_s")


@ORDERINGS.register("apparent_tardiness_cost")
class ApparentTardinessCost(Stateless):
    name: ClassVar[str] = "apparent_tardiness_cost"

    def __init__(self, config: Config | None = None) -> None:
        self.config = config or Config()

    def rank(self, request: Request, cost: Cost, now: float) -> Rank:
        latest_start = request.due - cost.prefill_s
        worth = math.log(max(cost.service_s, 1e-6) / max(request.value, 1e-6))
        return Rank((latest_start / self.config.lookahead_s + worth, request.arrival))
