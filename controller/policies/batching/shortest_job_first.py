"""Shortest job first inside the engine, by the length bound at arrival, preemptive (Smith 1956): Concord's ablation
without CALM.

The bound is the predictor's; without one, `max_tokens`.

Deviation: a preempted sequence keeps its KV at no cost while there is room, which favours policies that preempt often.
`slots`: sequences per step. Cost: see ranked.py.
"""

from __future__ import annotations

from typing import ClassVar

from controller.core.steps import Seq
from controller.policies.batching.base import BATCHINGS
from controller.policies.batching.ranked import Key, RankConfig, Ranked


@BATCHINGS.register("shortest_job_first")
class ShortestJobFirstBatching(Ranked):
    name: ClassVar[str] = "shortest_job_first"
    Config = RankConfig

    def __init__(self, config: RankConfig | None = None) -> None:
        self.config = config or RankConfig()
        super().__init__(self.config.slots, self.config.preempt)

    def key(self, seq: Seq) -> Key:
        return (float(seq.max_tokens if seq.estimate is None else seq.estimate.length.upper(0)),)
