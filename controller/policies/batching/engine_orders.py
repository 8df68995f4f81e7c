"""Engine orders of the systems that Concord is measured against, as ranks with preemption (ranked.py).

- `learned_rank`: LTR (Fu et al., "Efficient LLM Scheduling by Learning to Rank", NeurIPS 2024,
  https://arxiv.org/abs/2408.15792), from its description: the shortest predicted answer first, chosen anew every
  iteration; a request that has not run for `promote_steps` iterations goes first, for `quantum_steps` iterations. The
  learned ranking is a noise model: the true length times exp(error x z). For lengths whose logarithm has deviation s,
  Kendall's tau is 2/pi asin(1/sqrt(1 + (error/s)^2)); `error` 0.73 gives 0.6 at s = 1, about what its paper reports.
- `least_attained_service`: Autellix (Luo et al., 2025, https://arxiv.org/abs/2502.13965), PLAS, from its description
  and Concord's: a call starts at the level of what all calls of its *program* have received, sinks a level whenever
  that passes the next threshold, first come first served within a level, preemptive. Thresholds double from
  `quantum_steps`; service is counted in iterations. A call that has waited `starvation` times its program's service
  goes to the first level (infinite: never). A sequence without a program is one of its own.
- `earliest_deadline_first`: the end promised by the Estimate (for programs the stage's amortised one), for paced
  requests the first token's; without an Estimate the first token's.
- `shortest_job_first`: the analyser's length bound at arrival (without one `max_tokens`).

Deviations: a preempted sequence keeps its KV at no cost while there is room, which favours those that preempt often.
`slots`: sequences a step. Cost: see ranked.py.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import Counter
from dataclasses import dataclass
from typing import ClassVar

from controller.core.errors import ConfigError
from controller.core.noise import standard_normal
from controller.core.steps import Seq
from controller.policies.batching.base import BATCHINGS
from controller.policies.batching.ranked import NEVER, Key, Ranked

LEVELS = 16


@dataclass(frozen=True, slots=True)
class RankConfig:
    slots: int = 64
    preempt: bool = True


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


@dataclass(frozen=True, slots=True)
class LeastAttainedConfig:
    slots: int = 64
    preempt: bool = True
    quantum_steps: int = 64
    starvation: float = math.inf

    def __post_init__(self) -> None:
        if self.quantum_steps < 1:
            raise ConfigError("quantum_steps must be at least 1", field="quantum_steps")
        if not self.starvation > 0:
            raise ConfigError("starvation must be positive", field="starvation")


@BATCHINGS.register("learned_rank")
class LearnedRank(Ranked):
    name: ClassVar[str] = "learned_rank"
    Config = LearnedRankConfig

    def __init__(self, config: LearnedRankConfig | None = None) -> None:
        self.config = config or LearnedRankConfig()
        super().__init__(self.config.slots, self.config.preempt)
        self._scores: dict[Seq, float] = {}
        self._quantum: dict[Seq, int] = {}  # iterations left of a promoted one

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


@BATCHINGS.register("least_attained_service")
class LeastAttainedService(Ranked):
    name: ClassVar[str] = "least_attained_service"
    Config = LeastAttainedConfig

    def __init__(self, config: LeastAttainedConfig | None = None) -> None:
        self.config = config or LeastAttainedConfig()
        super().__init__(self.config.slots, self.config.preempt)
        self._thresholds: list[int] = [self.config.quantum_steps << level for level in range(LEVELS)]
        self._programs: Counter[str] = Counter()  # iterations that ended calls of a program have received
        self._own: dict[Seq, int] = {}
        self._base: dict[Seq, int] = {}  # its program's service when it came; 0 after a promotion
        self._levels: dict[Seq, int] = {}

    def key(self, seq: Seq) -> Key:
        if seq not in self._base:
            self._base[seq] = self._programs[_program(seq)]
        level = self._levels[seq] = bisect_right(self._thresholds, self._base[seq] + self._own.get(seq, 0))
        return (float(level),)

    def served(self, seq: Seq, steps: int) -> bool:
        own = self._own[seq] = self._own.get(seq, 0) + steps
        return bisect_right(self._thresholds, self._base.get(seq, 0) + own) != self._levels.get(seq)

    def next_change(self, seq: Seq) -> int:
        level = self._levels.get(seq, 0)
        if level >= LEVELS:
            return NEVER
        return self._thresholds[level] - self._base.get(seq, 0) - self._own.get(seq, 0)

    def promoted_after(self, seq: Seq) -> int:
        if math.isinf(self.config.starvation):
            return NEVER
        return max(1, round(self.config.starvation * (self._base.get(seq, 0) + self._own.get(seq, 0) + 1)))

    def promote(self, seq: Seq) -> None:
        self._base[seq] = -self._own.get(seq, 0)

    def gone(self, seq: Seq) -> None:
        self._programs[_program(seq)] += self._own.pop(seq, 0)
        self._base.pop(seq, None)
        self._levels.pop(seq, None)
        if not (seq.estimate and seq.estimate.program):
            del self._programs[_program(seq)]


@BATCHINGS.register("earliest_deadline_first")
class EarliestDeadlineFirst(Ranked):
    name: ClassVar[str] = "earliest_deadline_first"
    Config = RankConfig

    def __init__(self, config: RankConfig | None = None) -> None:
        self.config = config or RankConfig()
        super().__init__(self.config.slots, self.config.preempt)

    def key(self, seq: Seq) -> Key:
        return (seq.due if seq.estimate is None else min(seq.due, seq.estimate.due),)


@BATCHINGS.register("shortest_job_first")
class ShortestJobFirst(Ranked):
    name: ClassVar[str] = "shortest_job_first"
    Config = RankConfig

    def __init__(self, config: RankConfig | None = None) -> None:
        self.config = config or RankConfig()
        super().__init__(self.config.slots, self.config.preempt)

    def key(self, seq: Seq) -> Key:
        return (float(seq.max_tokens if seq.estimate is None else seq.estimate.length.upper(0)),)


def _program(seq: Seq) -> str:
    return seq.estimate.program if seq.estimate is not None and seq.estimate.program else f"\0{seq.id}"
