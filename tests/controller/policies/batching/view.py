"""An engine as a batching policy sees it, without an engine."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from controller.core.steps import Seq
from controller.policies.batching import Batching


def running(name: str, computed: int, prompt: int = 10, output: int = 0) -> Seq:
    return Seq(name, 0.0, prompt, 100, computed=computed, output_tokens=output)


def decoding(name: str) -> Seq:
    return running(name, computed=10, output=1)


def queued(name: str, prompt: int) -> Seq:
    return Seq(name, 0.0, prompt, 100)


@dataclass
class FakeView:
    running: list[Seq] = field(default_factory=list)
    queue: list[Seq] = field(default_factory=list)
    token_budget: int = 20
    max_num_seqs: int = 8
    cached: dict[str, int] = field(default_factory=dict)

    def waiting(self) -> Iterator[Seq]:
        return iter(self.queue)

    def uncached(self, seq: Seq) -> int:
        return seq.tokens - self.cached.get(seq.id, 0)


def granted(policy: Batching, view: FakeView) -> list[tuple[str, int]]:
    return [(seq.id, tokens) for seq, tokens in policy.compose(view, 0.0)]
