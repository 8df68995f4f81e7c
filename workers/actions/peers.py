"""Which engines keep a link to which: those that may pull KV from each other, and warm spares with whoever has weights.

HyperFlexis (sec. 6) has its TransferLink Manager open links when an instance joins, and does not say between which
instances. Ours: all engines that prefill or decode for a model are linked both ways, because roles change without a
restart, and an engine without weights is linked from every engine of its model that has them. An engine that borrows
prefixes, in whatever role, is linked from every engine of its model. Cost: O(members^2) of a model.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

STAGES = ("prefill", "decode")


@dataclass(frozen=True, slots=True)
class PeerMember:
    """An engine that can keep links, and the host and port where others reach it (host "": unknown).

    `no_weights`: it has none, so it pulls them. `borrows`: it copies prefixes that others have cached.
    """

    id: str
    model: str
    role: str
    host: str
    port: int
    no_weights: bool = False
    borrows: bool = False


def peers(members: Iterable[PeerMember]) -> dict[str, tuple[PeerMember, ...]]:
    """By engine id: the engines from which it should keep a link, in order of their ids."""
    ranked = sorted(members, key=lambda each: each.id)
    return {
        target.id: tuple(source for source in ranked if source.host and _linked(source, target)) for target in ranked
    }


def need_links(members: Iterable[PeerMember]) -> bool:
    """Whether any of these engines would read KV or weights from another."""
    return any(each.no_weights or each.borrows or each.role in STAGES for each in members)


def _linked(source: PeerMember, target: PeerMember) -> bool:
    if source.id == target.id or source.model != target.model:
        return False
    disaggregated = source.role in STAGES and target.role in STAGES
    reads_weights = target.no_weights and not source.no_weights
    return disaggregated or reads_weights or (target.borrows and not source.no_weights)
