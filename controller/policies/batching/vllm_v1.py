"""What vLLM's own V1 scheduler composes, so that a simulated engine can stand for a real one.

Read from vllm/v1/core/sched/scheduler.py of vLLM 0.32.0, `Scheduler.schedule`. Implemented: one token budget for all;
running requests first, in the order in which they were admitted (not by priority), each getting its remaining tokens or
what is left of the budget, prefills cut to fit; then queued ones, most urgent first, until budget, slots or blocks end;
a cached prefix costs no budget. `long_prefill_tokens` is `long_prefill_token_threshold`, which binds only while more
than one request is there.

`async_scheduling` (its default on GPUs, off on CPUs; `EngineCore.step_with_batch_queue`) composes a step while the one
before it runs, as soon as that one begins. So a request waits for the step it arrives in *and* the one composed then,
and the slot of a sequence that ends in a step is free in the next but one. Off by default here, as what runs is not
steady with it: no leaps, a slower simulation.

Deviations: no speculative tokens, encoders, LoRA limits or connectors; with async_scheduling the *blocks* of a sequence
that ends are free one step early.

Cost: linear in running sequences plus those admitted; sorting only when the budget cannot hold all that run.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from controller.core.errors import ConfigError
from controller.core.steps import EngineEvent, Seq, SeqState, StepRan
from controller.policies.batching.base import BATCHINGS, EngineView, Grant


@dataclass(frozen=True, slots=True)
class VllmV1Config:
    long_prefill_tokens: int | None = None
    async_scheduling: bool = False

    def __post_init__(self) -> None:
        if self.long_prefill_tokens is not None and self.long_prefill_tokens < 1:
            raise ConfigError("long_prefill_tokens must be at least 1", field="long_prefill_tokens")


@BATCHINGS.register("vllm_v1")
class VllmV1:
    name: ClassVar[str] = "vllm_v1"
    Config = VllmV1Config

    def __init__(self, config: VllmV1Config | None = None) -> None:
        self.config = config or VllmV1Config()
        self.steady = not self.config.async_scheduling
        self._began = self._ended = -math.inf  # of the last step
        self._ended_in_step = 0  # sequences whose last token it gave

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
        known, room = math.inf, engine.max_num_seqs - len(running)
        if running and self._ended == now:  # no idle gap: this step was composed when the last one began
            known, room = self._began, room - self._ended_in_step
        for seq in engine.waiting():
            if budget <= 0 or room <= 0:
                break
            if seq.arrival > known:
                continue
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
        """When the last step began and what it ended: what a step composed ahead could not know."""
        if self.config.async_scheduling and isinstance(event, StepRan):
            self._began, self._ended = now - event.seconds / event.repeats, now
            ran = [*event.step.decodes, *(chunk.seq for chunk in event.step.chunks)]
            self._ended_in_step = sum(seq.state is SeqState.FINISHED for seq in ran)


def _as_admitted(running: Sequence[Seq], budget: int) -> Sequence[Seq]:
    """In order of admission, where the order matters: when the budget cannot hold all. Ties: arrival, then id."""
    if sum(seq.remaining for seq in running) <= budget:
        return running
    return sorted(running, key=lambda seq: (seq.scheduled_at or 0.0, seq.arrival, seq.id))
