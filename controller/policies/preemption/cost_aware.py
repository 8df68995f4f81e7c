"""Concord's cost-aware preemption: preempt only if the gain exceeds the cost of the interruption.

"Concord: SLO-Aware Optimization and Stateful Orchestration for LLM Systems", sec. 4.2 and App. D.1. Releasing a
sequence stalls the batch for its KV bytes over the I/O bandwidth, during which the engine would have generated tokens.
The challenger's priority must also exceed the running one's by a threshold, so that near ties do not alternate.

Goodput is counted in tokens. `round_trip`: bringing the KV back costs the same again, and both are charged (ours; the
paper counts the release alone). `threshold` 0.1 is the paper's delta of App. D. An engine that runs steps on a device
sets `costs`, what it has measured: the cheaper of the copy to host memory and back and of computing the KV again. Where
nothing is measured (a simulation), `bytes_per_token` and `bytes_per_s` describe the model's KV cache and the link that
it leaves by. Cost per decision: O(1), with `costs` O(log n) for n tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from controller.core.errors import ConfigError
from controller.policies.preemption.base import PREEMPTIONS, PreemptionChoice, PreemptionCosts, SequenceStanding


@dataclass(frozen=True, slots=True)
class Config:
    threshold: float = 0.1
    bytes_per_token: float = 131_072.0
    bytes_per_s: float = 16e9
    round_trip: bool = True

    def __post_init__(self) -> None:
        if self.threshold < 0:
            raise ConfigError("threshold must not be negative", field="threshold")
        for name in ("bytes_per_token", "bytes_per_s"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"{name} must be positive", field=name)


@PREEMPTIONS.register("cost_aware")
class CostAwarePreemption:
    name: ClassVar[str] = "cost_aware"

    def __init__(self, config: Config | None = None) -> None:
        self.config = config or Config()
        self.costs: PreemptionCosts | None = None

    def stall_s(self, kv_tokens: int) -> float:
        """Seconds for which releasing this much KV cache stalls the batch."""
        return kv_tokens * self.config.bytes_per_token / self.config.bytes_per_s

    def loss(self, kv_tokens: int, tokens_per_s: float) -> float:
        """Tokens that are not generated because of it."""
        measured = None if self.costs is None else self.costs.stall_s(kv_tokens, self.config.round_trip)
        if measured is not None:
            return measured * tokens_per_s
        return self.stall_s(kv_tokens) * tokens_per_s * (2.0 if self.config.round_trip else 1.0)

    def weigh(self, running: SequenceStanding, challenger: SequenceStanding, tokens_per_s: float) -> PreemptionChoice:
        """Both comparisons are strict: in a tie the running sequence stays."""
        gain, cost = challenger.goodput - running.goodput, self.loss(running.kv_tokens, tokens_per_s)
        if not challenger.priority > (1.0 + self.config.threshold) * running.priority:
            return PreemptionChoice(False, "within_threshold", gain, cost)
        if not gain > cost:
            return PreemptionChoice(False, "costs_more_than_it_gains", gain, cost)
        return PreemptionChoice(True, "worth_it", gain, cost)
