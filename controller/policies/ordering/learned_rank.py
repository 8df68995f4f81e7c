"""Shortest job first by a learned rank: LTR, with its ranking error as a setting.

Fu et al., "Efficient LLM Scheduling by Learning to Rank", NeurIPS 2024, https://arxiv.org/abs/2408.15792: a small model
ranks requests by predicted output length, and the scheduler serves the shortest first. The order follows its public
scheduler (github.com/hao-ai-lab/vllm-ltr, `vllm/core/scheduler.py`), with a noise model in place of the learned one:
the predicted length is the expected one times exp(error x z), where z is standard normal and fixed for a request (from
its id and `seed`). For lengths whose logarithm is normal with deviation s, Kendall's tau between true and predicted
order is 2/pi asin(1/sqrt(1 + (error/s)^2)): with s = 1 an error of 0 ranks perfectly, 1 gives 0.5, infinity 0. Use it
with true lengths (the simulator's `know_output`); otherwise the error of the length predictor adds to it.

Deviation: that code promotes a request that has not run for a number of iterations, and for a number of iterations. A
queue in front of an engine has no iterations. Here a request that has waited `promote_s` goes before all that have not,
by arrival. `error` 1.0, `promote_s` 60 (ours). Cost: O(1).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

from controller.core.errors import ConfigError
from controller.core.noise import standard_normal
from controller.core.policy import ORDERINGS, Cost, Rank, Stateless
from controller.core.types import Request

MOST_ERROR = 100.0  # its exponential is still a number


@dataclass(frozen=True, slots=True)
class Config:
    error: float = 1.0
    seed: int = 0
    promote_s: float = 60.0

    def __post_init__(self) -> None:
        if not 0 <= self.error <= MOST_ERROR:
            raise ConfigError(f"error must lie in [0, {MOST_ERROR:.0f}]", field="error")
        if not self.promote_s > 0:
            raise ConfigError("promote_s must be positive seconds", field="promote_s")


@ORDERINGS.register("learned_rank")
class LearnedRank(Stateless):
    name: ClassVar[str] = "learned_rank"

    def __init__(self, config: Config | None = None) -> None:
        self.config = config or Config()

    def rank(self, request: Request, cost: Cost, now: float) -> Rank:
        promoted_at = request.arrival + self.config.promote_s
        if now >= promoted_at:
            return Rank((0.0, request.arrival))
        noise = math.exp(self.config.error * standard_normal(request.id, self.config.seed))
        return Rank((1.0, request.output_tokens * noise), promoted_at)
