"""What a batching policy is: which tokens of which sequences run in the next step.

The policy says what it wants, in order; the engine scheduler gives it KV blocks as far as there are any, and evicts or
stops where there are not. So a policy never allocates, and a block manager never orders.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import Any, ClassVar, NamedTuple, Protocol, runtime_checkable

from controller.core.registry import Registry
from controller.core.steps import EngineEvent, Seq


class Grant(NamedTuple):
    """Compute the next `tokens` tokens of `seq` in this step."""

    seq: Seq
    tokens: int


class EngineView(Protocol):
    """What a policy may read of the engine. Never copied, never written."""

    @property
    def token_budget(self) -> int:
        """Most tokens one step may compute (max_num_batched_tokens)."""
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
        """Tokens a queued sequence still needs once the prefix cache has given what it has."""
        ...


class Batching(Protocol):
    """`compose` changes nothing; what is learned is learned in `observe`.

    A policy that also sets `steady = True` promises: while no sequence comes, ends or is evicted and all that run
    decode, it grants every running sequence one token, step after step. A simulator may then run such steps as one.
    One that sets `selects = True` is best sent everything (see `selects`).
    One that sets `reorders = True` admits queued sequences in an order of its own instead of the engine's.
    """

    name: ClassVar[str]

    def compose(self, engine: EngineView, now: float) -> list[Grant]:
        """Grants in order of preference. A queued sequence that is granted tokens is admitted if its blocks fit."""
        ...

    def observe(self, event: EngineEvent, now: float) -> None: ...


@runtime_checkable
class Pausing(Protocol):
    """A policy that lets admitted sequences wait with their KV while others run: preemption without losing work."""

    def spare(self, running: Sequence[Seq], wanted: Collection[Seq]) -> Seq | None:
        """Which running sequence outside `wanted` gives its KV back first when blocks or seats are short."""
        ...

    def stays(self) -> int:
        """How many steps in a row, from the one composed last, the policy would compose the same batch of decodes
        while no sequence comes, ends or is evicted. At least 1."""
        ...


BATCHINGS: Registry[type[Any]] = Registry("batching")


def selects(name: str) -> bool:
    """Whether an engine with this policy chooses by value among everything it was sent (`selects = True`), so that a
    queue in front of it would only hide work from that choice."""
    return bool(getattr(BATCHINGS[name], "selects", False))
