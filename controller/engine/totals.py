"""Counters of one engine since it started."""

from __future__ import annotations

from dataclasses import dataclass

from controller.core.steps import Seq


@dataclass(slots=True)
class Totals:
    """Counts since the start, in tokens unless named otherwise."""

    steps: int = 0
    preemptions: int = 0  # times
    rejected: int = 0  # sequences
    prompt: int = 0  # of sequences that were admitted
    prompt_cached: int = 0
    prefix_queries: int = 0
    prefix_hits: int = 0
    generated: int = 0
    step_tokens: int = 0

    def admitted(self, seq: Seq, prefix_caching: bool) -> None:
        if seq.preemptions:
            return  # counted at its first admission
        self.prompt += seq.prompt_tokens
        self.prompt_cached += seq.cached
        if prefix_caching:
            self.prefix_queries += seq.prompt_tokens
            self.prefix_hits += seq.cached
