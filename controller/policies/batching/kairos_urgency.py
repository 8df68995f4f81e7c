"""Kairos' urgency-based prefill, sign-aware: each step fills a chunk with the most urgent prompts.

"Kairos: Taming Request Imbalance, SLO-Aware Scheduling for Disaggregated LLM Inference", Alg. 1 and 2 (read as in
kairos_slack.py). The printed urgency divides the relative slack by the prompt's length, which reverses the order for
negative slack (kairos_urgency_printed.py). This one divides slack that is not negative and multiplies negative slack,
as the prose intends. It also limits ages: a prompt that has waited `age_bound` times its TTFT goes first (ours, because
the paper's "without risking starvation" does not hold otherwise). Cost: O(n log n) in prompts per step.

`tokens_per_s`: throughput before anything is measured, from a profile; `age_bound` 10 (ours).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

from controller.core.errors import ConfigError
from controller.policies.batching.base import BATCHINGS
from controller.policies.batching.kairos_slack import Prompt, Urgency, relative_slack


@dataclass(frozen=True, slots=True)
class KairosUrgencyConfig:
    tokens_per_s: float = 20_000.0
    age_bound: float = 10.0

    def __post_init__(self) -> None:
        if not self.tokens_per_s > 0:
            raise ConfigError("tokens_per_s must be positive", field="tokens_per_s")
        if not self.age_bound > 0:
            raise ConfigError("age_bound must be positive TTFTs", field="age_bound")


@BATCHINGS.register("kairos_urgency")
class KairosUrgency(Urgency):
    """Sign-aware, with an age limit."""

    name: ClassVar[str] = "kairos_urgency"
    Config = KairosUrgencyConfig

    def __init__(self, config: KairosUrgencyConfig | None = None) -> None:
        self.config = config or KairosUrgencyConfig()
        super().__init__(self.config.tokens_per_s)

    def urgency(self, prompt: Prompt, finish: float, now: float) -> float:
        if now - prompt.arrival > self.config.age_bound * prompt.ttft_s:
            return math.inf
        slack = relative_slack(prompt, finish)
        return slack / prompt.length if slack >= 0 else slack * prompt.length
