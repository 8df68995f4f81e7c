"""Shared by both variants of Kairos' urgency: first come, first served finish times, relative slack, and the filled
chunk.

"Kairos: Taming Request Imbalance, SLO-Aware Scheduling for Disaggregated LLM Inference", Alg. 1 and 2. Before every
step, each prompt's finish time under first come, first served is estimated from its remaining tokens and a running mean
of the prefill throughput. Its slack to the TTFT, relative to the TTFT, becomes its urgency. The chunk is filled in
descending order of urgency, the last prompt cut to fit.

Differences from the printed text: line 18 is c_used <- C and ends the loop; lines 13-15 use remaining tokens; line 22
counts the tokens of this step; Alg. 2 orders by (arrival, id), so that equal arrivals do not wait for each other.

On a collocated engine the decodes come first, as in chunked prefill (the paper's prefill instances have none). A TTFT
target of 0 counts as 1 s. Cost: O(n log n) in prompts per step.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import ClassVar, NamedTuple

from controller.core.steps import EngineEvent, Seq, StepRan
from controller.policies.batching.base import EngineView, Grant
from controller.policies.batching.filling import fill, prompts


class Prompt(NamedTuple):
    """What Alg. 1 and 2 read of a request. `arrival` and `ttft_s` in seconds, lengths in tokens."""

    arrival: float
    id: str
    length: int
    remaining: int
    ttft_s: float


def finish_times(queue: Iterable[Prompt], tokens_per_s: float, now: float) -> dict[str, float]:
    """Alg. 2 for all prompts in one pass: each finishes after those before it by (arrival, id)."""
    cursor, found = now, {}
    for prompt in sorted(queue):
        cursor += prompt.remaining / tokens_per_s
        found[prompt.id] = cursor
    return found


def relative_slack(prompt: Prompt, finish: float) -> float:
    """Eq. 1."""
    return (prompt.ttft_s - (finish - prompt.arrival)) / prompt.ttft_s


class Urgency:
    """Throughput and order. Subclasses define the urgency. Not steady: the order of the queue changes with time."""

    reorders: ClassVar[bool] = True

    def __init__(self, tokens_per_s: float) -> None:
        self._profiled = tokens_per_s
        self._tokens = 0
        self._seconds = 0.0

    @property
    def tokens_per_s(self) -> float:
        """Mean over all steps with prefill; before the first one, that of the profile."""
        return self._tokens / self._seconds if self._seconds > 0 else self._profiled

    def urgency(self, prompt: Prompt, finish: float, now: float) -> float:
        raise NotImplementedError

    def order(self, queue: Sequence[Prompt], now: float) -> list[Prompt]:
        """Most urgent first; ties by (arrival, id)."""
        finish = finish_times(queue, self.tokens_per_s, now)
        return sorted(queue, key=lambda prompt: (-self.urgency(prompt, finish[prompt.id], now), prompt))

    def compose(self, engine: EngineView, now: float) -> list[Grant]:
        decodes = [Grant(seq, 1) for seq in engine.running if seq.decoding][: engine.token_budget]
        by_id = {item.seq.id: item for item in prompts(engine)}
        if not by_id:
            return decodes
        ordered = self.order([as_prompt(item.seq, item.needed) for item in by_id.values()], now)
        return decodes + fill(engine, (by_id[prompt.id] for prompt in ordered), engine.token_budget - len(decodes))

    def observe(self, event: EngineEvent, now: float) -> None:
        if isinstance(event, StepRan) and event.step.chunks and event.seconds > 0:
            self._tokens += sum(chunk.length for chunk in event.step.chunks)
            self._seconds += event.seconds


def as_prompt(seq: Seq, needed: int) -> Prompt:
    """`needed`: tokens still to compute."""
    promised = seq.ttft_s if math.isfinite(seq.ttft_s) else 1.0
    arrival = seq.due - seq.ttft_s if math.isfinite(seq.due) else seq.arrival
    return Prompt(arrival, seq.id, seq.prompt_tokens, needed, promised)
