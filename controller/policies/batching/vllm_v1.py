"""What vLLM's own V1 scheduler composes, so that a simulated engine can stand for a real one.

Read from vllm/v1/core/sched/scheduler.py of vLLM 0.32.0, `Scheduler.schedule`. Implemented: one token budget for all;
running requests first, in the order in which they were admitted (not by priority), each getting its remaining tokens or
what is left of the budget, prefills cut to fit; then queued ones, most urgent first, until budget, slots or blocks end;
a cached prefix costs no budget. `long_prefill_tokens` is `long_prefill_token_threshold`, which binds only while more
than one request is there. Deviations: no speculative tokens, encoders, LoRA limits, connectors or asynchronous
scheduling (which composes one step ahead).

Cost: linear in running sequences plus those admitted; sorting only when the budget cannot hold all that run.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from controller.core.errors import ConfigError
from controller.core.steps import EngineEvent, Seq
from controller.policies.batching.base import BATCHINGS, EngineView, Grant


@dataclass(frozen=True, slots=True)
class VllmV1Config:
    long_prefill_tokens: int | None = None

    def __post_init__(self) -> None:
        if self.long_prefill_tokens is not None and self.long_prefill_tokens < 1:
            raise ConfigError("long_prefill_tokens must be at least 1", field="long_prefill_tokens")


@BATCHINGS.register("vllm_v1")
class VllmV1:
    name: ClassVar[str] = "vllm_v1"
    steady: ClassVar[bool] = True
    Config = VllmV1Config

    def __init__(self, config: VllmV1Config | None = None) -> None:
        self.config = config or VllmV1Config()

    def compose(self, engine: EngineView, now: float) -> list[Grant]:
        budget = engine.token_budget
        running = _as_admitted(engine.running, budget)
        cap = self._cap(engine)
        grants: list[Grant] = []
        for seq in running:
            if budget <= 0:
                return grants
            tokens = min(seq.remaining, cap, budget)
            grants.append(Grant(seq, tokens))
            budget -= tokens
        room = engine.max_num_seqs - len(running)
        for seq in engine.waiting():
            if budget <= 0 or room <= 0:
                break
            tokens = min(engine.uncached(seq), cap, budget)
            grants.append(Grant(seq, tokens))
            budget -= tokens
            room -= 1
        return grants

    def _cap(self, engine: EngineView) -> int:
        """Most tokens of one request in this step."""
        cap, running = self.config.long_prefill_tokens, len(engine.running)
        if cap is None or running + (next(engine.waiting(), None) is not None) < 2:
            return engine.token_budget
        return cap

    def observe(self, event: EngineEvent, now: float) -> None:
        """Nothing to learn."""


def _as_admitted(running: Sequence[Seq], budget: int) -> Sequence[Seq]:
    """In order of admission, where the order matters: when the budget cannot hold all. Ties: arrival, then id."""
    if sum(seq.remaining for seq in running) <= budget:
        return running
    return sorted(running, key=lambda seq: (seq.scheduled_at or 0.0, seq.arrival, seq.id))
