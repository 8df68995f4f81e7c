"""The interface of batching policies: which tokens of which sequences run in the next step.

The policy returns grants in order of preference. The engine scheduler gives them KV blocks, and evicts or stops when
there are too few. So a policy never allocates, and the block manager never orders.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import Any, ClassVar, NamedTuple, Protocol, runtime_checkable

from controller.core.registry import Registry
from controller.core.steps import EngineEvent, Seq
from controller.policies.preemption.base import PreemptionCosts


class Grant(NamedTuple):
    """Compute the next `tokens` tokens of `seq` in this step."""

    seq: Seq
    tokens: int


class EngineView(Protocol):
    """What a policy may read of the engine. It is not a copy, so policies must not change it."""

    @property
    def token_budget(self) -> int:
        """Most tokens that one step may compute (max_num_batched_tokens)."""
        ...

    @property
    def max_num_seqs(self) -> int: ...

    @property
    def running(self) -> Sequence[Seq]:
        """Admitted sequences, most urgent first."""
        ...

    def waiting(self) -> Iterator[Seq]:
        """Queued sequences, most urgent first."""
        ...

    def uncached(self, seq: Seq) -> int:
        """Tokens that a queued sequence still needs beyond its cached prefix."""
        ...


class Batching(Protocol):
    """`compose` changes nothing; learning happens in `observe`. Optional attributes:

    - `steady = True` promises that while no sequence joins, ends or is evicted and all running ones decode, every step
      grants each of them one token. A simulator may then run such steps as one.
    - `selects = True`: the policy chooses best if the engine gets all requests at once (see `selects`).
    - `reorders = True`: queued sequences are admitted in an order of the policy's own instead of the engine's.
    """

    name: ClassVar[str]

    def compose(self, engine: EngineView, now: float) -> list[Grant]:
        """Grants in order of preference. A queued sequence with a grant is admitted if its blocks fit."""
        ...

    def observe(self, event: EngineEvent, now: float) -> None: ...


@runtime_checkable
class Pausing(Protocol):
    """A policy that lets admitted sequences wait with their KV while others run: preemption without losing work."""

    def spare(self, running: Sequence[Seq], wanted: Collection[Seq]) -> Seq | None:
        """The running sequence outside `wanted` to evict first when blocks or slots are short."""
        ...

    def stays(self) -> int:
        """For how many steps, from the one composed last, the policy would compose the same batch of decodes while no
        sequence joins, ends or is evicted. At least 1.
        """
        ...


@runtime_checkable
class Weighing(Protocol):
    """A policy that weighs what a preemption costs."""

    def weigh_by(self, costs: PreemptionCosts) -> None:
        """Use what the engine measures from now on in place of constants."""
        ...


BATCHINGS: Registry[type[Any]] = Registry("batching")


def selects(name: str) -> bool:
    """Whether an engine with this policy chooses by value among all its requests (`selects = True`).

    A queue in front of it would only hide requests from that choice.
    """
    return bool(getattr(BATCHINGS[name], "selects", False))
