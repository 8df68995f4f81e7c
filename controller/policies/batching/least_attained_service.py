"""Least attained service by program, in levels, preemptive: Autellix' order inside the engine.

Autellix (Luo et al., "Autellix: An Efficient Serving Engine for LLM Agents as General Programs", 2025,
https://arxiv.org/abs/2502.13965), PLAS. Built from Concord's description and excerpts of its paper; the full paper and
the authors' code were not available. A call starts at the level of the service that all calls of its *program* have
received, and sinks a level whenever that passes the next threshold; within a level it is first come, first served.
Thresholds double from `quantum_steps`; service is counted in iterations. A call that has waited `starvation` times its
program's service goes to the first level (infinite: never). A sequence without a program is one of its own.

Deviation: a preempted sequence keeps its KV at no cost while there is room, which favours policies that preempt often.
`slots`: sequences per step. Cost: see ranked.py.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import Counter
from dataclasses import dataclass
from typing import ClassVar

from controller.core.errors import ConfigError
from controller.core.steps import Seq
from controller.policies.batching.base import BATCHINGS
from controller.policies.batching.ranked import NEVER, Key, Ranked

LEVELS = 16


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


@BATCHINGS.register("least_attained_service")
class LeastAttainedServiceBatching(Ranked):
    name: ClassVar[str] = "least_attained_service"
    Config = LeastAttainedConfig

    def __init__(self, config: LeastAttainedConfig | None = None) -> None:
        self.config = config or LeastAttainedConfig()
        super().__init__(self.config.slots, self.config.preempt)
        self._thresholds: list[int] = [self.config.quantum_steps << level for level in range(LEVELS)]
        self._programs: Counter[str] = Counter()  # iterations received by the ended calls of each program
        self._own: dict[Seq, int] = {}
        self._base: dict[Seq, int] = {}  # its program's service when it arrived; 0 after a promotion
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


def _program(seq: Seq) -> str:
    return seq.estimate.program if seq.estimate is not None and seq.estimate.program else f"\0{seq.id}"
