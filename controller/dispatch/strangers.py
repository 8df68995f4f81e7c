"""Which decode instances said that the KV of which prefill instance is of another model or layout (`other_model`).

That is true of what the two engines run, not of one request, so nobody else need find it out with a prefill of its own.
A pair that was held apart for long enough is tried by one transfer; the others stay away until it has landed or failed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from controller.core.types import Load
from controller.dispatch.transfers import State, Transfer

NOBODY: frozenset[str] = frozenset()


class _Pair:
    __slots__ = ("tried_by", "until")

    def __init__(self) -> None:
        self.until = 0.0
        self.tried_by: Transfer | None = None


class Strangers:
    """Times are the caller's seconds. A pair is held apart until either end begins a new run (`forget`), KV was read
    all the same (`read`), or for `lasts_s`: a mistake heals, at the price of one prefill each time it is none.
    `under_way`: is this transfer still what becomes of its request? It is asked each time, so that no trial is left
    behind by one that vanished."""

    def __init__(self, lasts_s: float, under_way: Callable[[Transfer], bool]) -> None:
        self._lasts_s = lasts_s
        self._under_way = under_way
        self._pairs: dict[str, dict[str, _Pair]] = {}  # by source and target

    def __len__(self) -> int:
        """Sources of which some are known."""
        return len(self._pairs)

    def met(self, source: str, target: str, now: float) -> None:
        pair = self._pairs.setdefault(source, {}).setdefault(target, _Pair())
        pair.until, pair.tried_by = now + self._lasts_s, None

    def of(self, source: str, now: float, by: Transfer | None = None) -> frozenset[str]:
        """Decode instances that do not read what is computed there, and those of which another than `by` finds out."""
        known = self._pairs.get(source)
        if known is None:
            return NOBODY
        return frozenset(target for target, pair in known.items() if now < pair.until or self._tried(pair, source, by))

    def tries(self, transfer: Transfer, targets: Iterable[str], now: float) -> None:
        """From now on it is the one that finds out about those of the targets that are open to a trial."""
        known = self._pairs.get(transfer.source)
        for target in targets if known else ():
            pair = known.get(target) if known else None
            if pair is not None and now >= pair.until and not self._tried(pair, transfer.source, transfer):
                pair.tried_by = transfer

    def doubtful(self, source: str, target: str) -> bool:
        """It said so once."""
        return target in self._pairs.get(source, ())

    def trying(self, transfer: Transfer) -> bool:
        """Does it find out about any? Then it may go where others of its kind may not."""
        known = self._pairs.get(transfer.source)
        return known is not None and any(pair.tried_by is transfer for pair in known.values())

    def read(self, source: str, target: str) -> None:
        """KV of one was taken by the other."""
        known = self._pairs.get(source)
        if known is not None and known.pop(target, None) is not None and not known:
            del self._pairs[source]

    def forget(self, instance_id: str) -> None:
        """It has gone or begins a new run, maybe with the model that is wanted."""
        if not self._pairs:
            return
        self._pairs.pop(instance_id, None)
        for source in list(self._pairs):
            self.read(source, instance_id)

    def _tried(self, pair: _Pair, source: str, by: Transfer | None) -> bool:
        """By another one. Who waits with all computed goes before one whose prefill may last for long still."""
        holder = pair.tried_by
        if holder is None or holder is by or holder.source != source or not self._under_way(holder):
            return False
        computed = by is not None and by.source == source and by.state is not State.PREFILLING
        return not (computed and holder.state is State.PREFILLING)


def begins_anew(load: Load, before: Load | None) -> bool:
    """It sleeps, and may wake with other weights; or what it counts is less than it was: it was started again between
    two reports."""
    if not load.awake:
        return True
    return before is not None and load.generation_tokens_total < before.generation_tokens_total
