"""What decides whether a running sequence gives way: on two standings, never on the sequences themselves."""

from __future__ import annotations

from typing import ClassVar, NamedTuple, Protocol

from controller.core.registry import Registry


class SequenceStanding(NamedTuple):
    """A sequence as preemption sees it: its priority (goodput per second), its goodput, and tokens in its KV cache."""

    priority: float
    goodput: float
    kv_tokens: int = 0


class PreemptionChoice(NamedTuple):
    """`gain` and `cost` in tokens of goodput."""

    preempt: bool
    reason: str
    gain: float
    cost: float


class Preemption(Protocol):
    name: ClassVar[str]

    def weigh(self, running: SequenceStanding, challenger: SequenceStanding, tokens_per_s: float) -> PreemptionChoice:
        """Should the challenger take the running one's place? `tokens_per_s`: what the engine generates meanwhile."""
        ...


PREEMPTIONS: Registry[type[Preemption]] = Registry("preemption")
