"""Kairos' urgency-based prefill as printed, to reproduce the paper's curves.

"Kairos: Taming Request Imbalance, SLO-Aware Scheduling for Disaggregated LLM Inference", Alg. 1 and 2, eq. 1 (read as
in kairos_slack.py). The relative slack is divided by the prompt's length, whatever its sign. For negative slack this
reverses the order, longest first (the paper's own example then misses both), and under overload it falls back towards
arrival order. Cost: O(n log n) in prompts per step.

`tokens_per_s`: throughput before anything is measured, from a profile.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from controller.core.errors import ConfigError
from controller.policies.batching.base import BATCHINGS
from controller.policies.batching.kairos_slack import Prompt, Urgency, relative_slack


@dataclass(frozen=True, slots=True)
class KairosUrgencyPrintedConfig:
    tokens_per_s: float = 20_000.0

    def __post_init__(self) -> None:
        if not self.tokens_per_s > 0:
            raise ConfigError("tokens_per_s must be positive", field="tokens_per_s")


@BATCHINGS.register("kairos_urgency_printed")
class KairosUrgencyPrinted(Urgency):
    """The formula as printed, to reproduce the paper's curves."""

    name: ClassVar[str] = "kairos_urgency_printed"
    Config = KairosUrgencyPrintedConfig

    def __init__(self, config: KairosUrgencyPrintedConfig | None = None) -> None:
        self.config = config or KairosUrgencyPrintedConfig()
        super().__init__(self.config.tokens_per_s)

    def urgency(self, prompt: Prompt, finish: float, now: float) -> float:
        return relative_slack(prompt, finish) / prompt.length
