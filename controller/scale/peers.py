"""Which engines keep a link to which: those that may pull KV of one another, and warm ones with who has the weights.

HyperFlexis (sec. 6) lets its TransferLink Manager make links when an instance joins; it does not say between whom.
Ours: all that prefill or decode for a model are linked both ways, because roles change without a restart; an engine
without weights is linked from every one of its model that has them. Cost: O(members^2) of a model.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

STAGES = ("prefill", "decode")


@dataclass(frozen=True, slots=True)
class Member:
    """An engine that can keep links, and where others reach it ("": it does not say). `hollow`: it has no weights."""

    id: str
    model: str
    role: str
    host: str
    port: int
    hollow: bool = False


def peers(members: Iterable[Member]) -> dict[str, tuple[Member, ...]]:
    """By engine: from whom it is to keep a link, by id."""
    ranked = sorted(members, key=lambda each: each.id)
    return {
        target.id: tuple(source for source in ranked if source.host and _linked(source, target)) for target in ranked
    }


def exchange(members: Iterable[Member]) -> bool:
    """Is there anything that engines of these would want of one another?"""
    return any(each.hollow or each.role in STAGES for each in members)


def _linked(source: Member, target: Member) -> bool:
    if source.id == target.id or source.model != target.model:
        return False
    apart = source.role in STAGES and target.role in STAGES
    return apart or (target.hollow and not source.hollow)
