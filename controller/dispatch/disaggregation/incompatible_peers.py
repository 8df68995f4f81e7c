"""Which decode instances said that the KV of which prefill instance is of another model or layout (`other_model`).

That is true of what the two engines run, not of one request, so nobody else need find it out with a prefill of its own.
A word that is old is believed no more, and a trial asks for a new one: one prefill at that source at a time, while the
others are sent elsewhere. What is computed already goes wherever no word is believed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from controller.core.types import Load
from controller.dispatch.disaggregation.transfers import Transfer

NOBODY: frozenset[str] = frozenset()


class IncompatiblePeers:
    """Times are the caller's seconds. A word is believed until either end begins a new run (`forget`), for `lasts_s` at
    most, and remembered until KV was read all the same (`read`). `under_way`: is this transfer still what becomes of
    its request? It is asked each time, so that no trial is left behind by one that vanished."""

    def __init__(self, lasts_s: float, under_way: Callable[[Transfer], bool]) -> None:
        self._lasts_s = lasts_s
        self._under_way = under_way
        self._until: dict[str, dict[str, float]] = {}  # by source and target
        self._trials: dict[str, Transfer] = {}  # by source

    def __len__(self) -> int:
        """Sources of which some are known."""
        return len(self._until)

    def met(self, source: str, target: str, now: float) -> None:
        self._until.setdefault(source, {})[target] = now + self._lasts_s
        self._trials.pop(source, None)

    def of(self, source: str, now: float) -> frozenset[str]:
        """Decode instances that do not read what is computed there."""
        known = self._until.get(source)
        return NOBODY if known is None else frozenset(target for target, until in known.items() if now < until)

    def doubted(self, source: str, targets: Iterable[str]) -> bool:
        """Did each of them say so once?"""
        known = self._until.get(source)
        return known is not None and all(target in known for target in targets)

    def tried(self, source: str) -> bool:
        """Is one on its way that finds out whether it is true still?"""
        holder = self._trials.get(source)
        return holder is not None and holder.source == source and self._under_way(holder)

    def tries(self, transfer: Transfer) -> None:
        self._trials[transfer.source] = transfer

    def read(self, source: str, target: str, now: float) -> None:
        """KV of one was taken by the other. While a word is believed nothing is sent there: it is of a run before."""
        known = self._until.get(source)
        if known is not None and now >= known.get(target, now):
            self._drop(source, target)

    def forget(self, instance_id: str) -> None:
        """It has gone or begins a new run, maybe with the model that is wanted."""
        if not self._until:
            return
        self._until.pop(instance_id, None)
        self._trials.pop(instance_id, None)
        for source in list(self._until):
            self._drop(source, instance_id)

    def _drop(self, source: str, target: str) -> None:
        known = self._until[source]
        known.pop(target, None)
        if not known:
            del self._until[source]
            self._trials.pop(source, None)


def begins_new_run(load: Load, before: Load | None) -> bool:
    """It sleeps, and may wake with other weights; or what it counts is less than it was: it was started again between
    two reports."""
    if not load.awake:
        return True
    return before is not None and load.generation_tokens_total < before.generation_tokens_total
