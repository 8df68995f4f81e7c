"""ALADDIN's placement: the fullest instance that can still take the request, so that others stay free.

Nie, Fonseca and Liu, "Aladdin: Joint Placement and Scaling for SLO-Aware LLM Serving", 2024,
https://arxiv.org/abs/2405.06856. Built from its abstract and public summaries (best-fit packing of requests into
workers under KV and latency constraints) and from HyperFlexis' description; the full paper and the authors' code were
not available. Which instances *can* take it is decided by the pacing (`worst_case_fit`). Among those, best fit takes
the one with the largest share of slots or KV in use; `fit` "worst" takes the emptiest instead. Ties: most tokens, then
in turn. Cost: O(instances) per request.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from controller.core.errors import ConfigError
from controller.core.policy import ROUTINGS, InstanceView, Stateless


@dataclass(frozen=True, slots=True)
class Config:
    fit: str = "best"

    def __post_init__(self) -> None:
        if self.fit not in ("best", "worst"):
            raise ConfigError(f"unknown fit {self.fit!r}; valid: best, worst", field="fit")


@ROUTINGS.register("best_fit")
class BestFit(Stateless):
    name: ClassVar[str] = "best_fit"

    def __init__(self, config: Config | None = None) -> None:
        self.config = config or Config()

    def choose(self, instances: Sequence[InstanceView], now: float) -> InstanceView | None:
        sign = -1 if self.config.fit == "best" else 1

        def fullness(instance: InstanceView) -> tuple[float, int, int, str]:
            tokens = instance.context_tokens + instance.waiting_tokens
            return (sign * instance.utilisation(), sign * tokens, instance.last_sent, instance.id)

        return min(instances, key=fullness, default=None)
