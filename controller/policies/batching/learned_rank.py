"""Shortest predicted answer first, chosen again every iteration: LTR's order inside the engine, with its ranking error.

LTR (Fu et al., "Efficient LLM Scheduling by Learning to Rank", NeurIPS 2024, https://arxiv.org/abs/2408.15792), after
its public scheduler (github.com/hao-ai-lab/vllm-ltr, `vllm/core/scheduler.py`): a request that has not run for
`promote_steps` iterations goes first, for `quantum_steps` iterations. The learned ranking is replaced by a noise model:
the true length times exp(error x z). For lengths whose logarithm has deviation s, Kendall's tau is 2/pi asin(1/sqrt(1 +
(error/s)^2)); `error` 0.73 gives 0.6 at s = 1, about what its paper reports.

Deviations: decodes come before prompts within a step (in LTR the rank alone decides which sequences get tokens). A
sequence that loses its blocks is computed again instead of swapped. A preempted sequence keeps its KV at no cost while
there is room, which favours policies that preempt often. `slots`: sequences per step. Cost: see ranked.py.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

from controller.core.errors import ConfigError
from controller.core.noise import standard_normal
from controller.core.steps import Seq
from controller.policies.batching.base import BATCHINGS
from controller.policies.batching.ranked import NEVER, Key, Ranked


@dataclass(frozen=True, slots=True)
class LearnedRankConfig:
    slots: int = 64
    preempt: bool = True
    error: float = 0.73
    seed: int = 0
    promote_steps: int = 2_000
    quantum_steps: int = 200

    def __post_init__(self) -> None:
        if not 0 <= self.error < math.inf:
            raise ConfigError("error must be a number of at least 0", field="error")
        for name in ("promote_steps", "quantum_steps"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be at least 1", field=name)


@BATCHINGS.register("learned_rank")
class LearnedRankBatching(Ranked):
    name: ClassVar[str] = "learned_rank"
    Config = LearnedRankConfig

    def __init__(self, config: LearnedRankConfig | None = None) -> None:
        self.config = config or LearnedRankConfig()
        super().__init__(self.config.slots, self.config.preempt)
        self._scores: dict[Seq, float] = {}
        self._quantum: dict[Seq, int] = {}  # iterations left of a promotion

    def key(self, seq: Seq) -> Key:
        score = self._scores.get(seq)
        if score is None:
            noise = math.exp(self.config.error * standard_normal(seq.id, self.config.seed))
            score = self._scores[seq] = seq.max_tokens * noise
        return (0.0 if seq in self._quantum else 1.0, score)

    def served(self, seq: Seq, steps: int) -> bool:
        left = self._quantum.get(seq)
        if left is None:
            return False
        if left > steps:
            self._quantum[seq] = left - steps
            return False
        del self._quantum[seq]
        return True

    def next_change(self, seq: Seq) -> int:
        return self._quantum.get(seq, NEVER)

    def promoted_after(self, seq: Seq) -> int:
        return self.config.promote_steps

    def promote(self, seq: Seq) -> None:
        self._quantum[seq] = self.config.quantum_steps

    def gone(self, seq: Seq) -> None:
        self._scores.pop(seq, None)
        self._quantum.pop(seq, None)
