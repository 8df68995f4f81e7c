"""Composes steps as vLLM's own V1 scheduler does, so that a simulated engine can stand for a real one.

After vllm/v1/core/sched/scheduler.py of vLLM 0.32.0, `Scheduler.schedule`. There is one token budget for all. Running
requests come first, in the order in which they were admitted (not by priority). Each gets its remaining tokens or the
rest of the budget, and prefills are cut to fit. Then come queued ones, most urgent first, until budget, slots or blocks
run out; a cached prefix costs no budget. `long_prefill_tokens` is `long_prefill_token_threshold`, which applies only
while there is more than one request.

`async_scheduling` (vLLM's default on GPUs, off on CPUs; `EngineCore.step_with_batch_queue`) composes a step as soon as
the previous one begins. So a request waits for the step during which it arrives *and* the one composed then, and the
slot of a sequence that ends in a step is free only in the step after the next. Off by default here, since the steps are
not steady with it, which makes simulation slower.

Deviations: no speculative tokens, encoders, LoRA limits or connectors; with async_scheduling the *blocks* of a sequence
that ends are free one step early.

Cost: linear in running sequences plus those admitted; sorting only when the budget cannot hold all running ones.
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
        self._ended_in_step = 0  # sequences that it ended

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
        if running and self._ended == now:  # no idle gap, so this step was composed when the last one began
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
        """When the last step began and which sequences it ended, which a step composed ahead could not know."""
        if self.config.async_scheduling and isinstance(event, StepRan):
            self._began, self._ended = now - event.seconds / event.repeats, now
            ran = [*event.step.decodes, *(chunk.seq for chunk in event.step.chunks)]
            self._ended_in_step = sum(seq.state is SeqState.FINISHED for seq in ran)


def _as_admitted(running: Sequence[Seq], budget: int) -> Sequence[Seq]:
    """In order of admission, if the order matters (the budget cannot hold all). Ties: arrival, then id."""
    if sum(seq.remaining for seq in running) <= budget:
        return running
    return sorted(running, key=lambda seq: (seq.scheduled_at or 0.0, seq.arrival, seq.id))
