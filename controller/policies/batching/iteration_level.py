"""Iteration-level scheduling (Orca): sequences join and leave between any two steps; prompts run whole.

Yu et al., "Orca: A Distributed Serving System for Transformer-Based Generative Models", OSDI 2022,
https://www.usenix.org/conference/osdi22/presentation/yu, algorithm 1: up to `max_num_seqs` sequences in the engine's
order, each of which computes its whole prompt or one token. Deviations: KV blocks are allocated as tokens are computed
instead of being reserved for the longest output at admission (an engine without preemption must reserve; this one
preempts), and the step's token budget limits how many prompts share a step. A prompt longer than the budget runs
without another prompt, since this policy never cuts prompts.

Cost: linear in running sequences plus those admitted. No settings.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from controller.core.steps import EngineEvent
from controller.policies.batching.base import BATCHINGS, EngineView, Grant


@dataclass(frozen=True, slots=True)
class IterationLevelConfig:
    pass


@BATCHINGS.register("iteration_level")
class IterationLevel:
    name: ClassVar[str] = "iteration_level"
    steady: ClassVar[bool] = True
    Config = IterationLevelConfig

    def __init__(self, config: IterationLevelConfig | None = None) -> None:
        self.config = config or IterationLevelConfig()

    def compose(self, engine: EngineView, now: float) -> list[Grant]:
        grants = [Grant(seq, seq.remaining) for seq in engine.running]
        used = sum(grant.tokens for grant in grants)
        prompts = sum(not grant.seq.decoding for grant in grants)
        room = engine.max_num_seqs - len(grants)
        for seq in engine.waiting():
            tokens = engine.uncached(seq)
            if room <= 0 or (prompts and used + tokens > engine.token_budget):
                break
            grants.append(Grant(seq, tokens))
            used, prompts, room = used + tokens, prompts + 1, room - 1
        return grants

    def observe(self, event: EngineEvent, now: float) -> None:
        """Nothing to learn."""
