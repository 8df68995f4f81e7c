"""The interface of preemption policies. They compare two standings and never see the sequences themselves."""

from __future__ import annotations

from typing import ClassVar, NamedTuple, Protocol

from controller.core.registry import Registry


class SequenceStanding(NamedTuple):
    """What preemption knows of a sequence: priority (goodput per second), goodput, and tokens in its KV cache."""

    priority: float
    goodput: float
    kv_tokens: int = 0


class PreemptionChoice(NamedTuple):
    """Whether to preempt. `gain` and `cost` in tokens of goodput."""

    preempt: bool
    reason: str
    gain: float
    cost: float


class PreemptionCosts(Protocol):
    """What an engine has measured of the loss of KV."""

    def stall_s(self, kv_tokens: int, both: bool = True) -> float | None:
        """Seconds that the loss of this much KV costs, by the cheaper way: to copy it to host memory and, with `both`,
        back, or to compute it again. None: nothing has been measured yet."""
        ...


class Preemption(Protocol):
    name: ClassVar[str]

    def weigh(self, running: SequenceStanding, challenger: SequenceStanding, tokens_per_s: float) -> PreemptionChoice:
        """Whether the challenger replaces the running one.

        `tokens_per_s`: tokens that the engine generates meanwhile.
        """
        ...


PREEMPTIONS: Registry[type[Preemption]] = Registry("preemption")
