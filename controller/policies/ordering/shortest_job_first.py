"""Shortest job first, by predicted service time.

The textbook rule (Smith 1956 for mean flow time). With perfect predictions it is the optimum that learned-rank
schedulers approximate (LTR: Fu et al., "Efficient LLM Scheduling by Learning to Rank", NeurIPS 2024). It has no
deadlines and starves long requests under overload. `by` defines the job: "service" (prefill and expected decodes) or
"prefill" alone, which Kairos compares against. Cost per decision: O(1).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from controller.core.errors import ConfigError
from controller.core.policy import ORDERINGS, Cost, Rank, Stateless
from controller.core.types import Request


@dataclass(frozen=True, slots=True)
class Config:
    by: str = "service"

    def __post_init__(self) -> None:
        if self.by not in ("service", "prefill"):
            raise ConfigError(f"unknown {self.by!r}; valid: prefill, service", field="by")


@ORDERINGS.register("shortest_job_first")
class ShortestJobFirst(Stateless):
    name: ClassVar[str] = "shortest_job_first"

    def __init__(self, config: Config | None = None) -> None:
        self.config = config or Config()

    def rank(self, request: Request, cost: Cost, now: float) -> Rank:
        return Rank((cost.prefill_s if self.config.by == "prefill" else cost.service_s, request.arrival))
