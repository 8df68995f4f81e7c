"""Earliest deadline first inside the engine, preemptive (Liu and Layland 1973): Concord's EDF baseline.

The deadline is the end given by the Estimate (for programs, that of the stage under the amortised deadline). For paced
requests, and without an Estimate, it is that of the first token.

Deviation: a preempted sequence keeps its KV at no cost while there is room, which favours policies that preempt often.
`slots`: sequences per step. Cost: see ranked.py.
"""

from __future__ import annotations

from typing import ClassVar

from controller.core.steps import Seq
from controller.policies.batching.base import BATCHINGS
from controller.policies.batching.ranked import Key, RankConfig, Ranked


@BATCHINGS.register("earliest_deadline_first")
class EarliestDeadlineFirstBatching(Ranked):
    name: ClassVar[str] = "earliest_deadline_first"
    Config = RankConfig

    def __init__(self, config: RankConfig | None = None) -> None:
        self.config = config or RankConfig()
        super().__init__(self.config.slots, self.config.preempt)

    def key(self, seq: Seq) -> Key:
        return (seq.due if seq.estimate is None else min(seq.due, seq.estimate.due),)
