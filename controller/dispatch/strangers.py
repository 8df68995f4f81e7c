"""Which decode instances said that the KV of which prefill instance is of another model or layout (`other_model`).

That is true of what the two engines run, not of one request, so nobody else need find it out with a prefill of its own.
"""

from __future__ import annotations

from controller.core.types import Load

NOBODY: frozenset[str] = frozenset()


class Strangers:
    """Times are the caller's seconds. A pair is held apart until either end begins a new run (`forget`), and for
    `lasts_s` at most: a mistake heals, at the price of one prefill."""

    def __init__(self, lasts_s: float) -> None:
        self._lasts_s = lasts_s
        self._until: dict[str, dict[str, float]] = {}  # by source and target

    def __len__(self) -> int:
        """Sources of which some are known."""
        return len(self._until)

    def met(self, source: str, target: str, now: float) -> None:
        self._until.setdefault(source, {})[target] = now + self._lasts_s

    def of(self, source: str, now: float) -> frozenset[str]:
        """Decode instances that do not read what is computed there."""
        known = self._until.get(source)
        if known is None:
            return NOBODY
        found = frozenset(target for target, until in known.items() if now < until)
        if not found:
            del self._until[source]
        return found

    def forget(self, instance_id: str) -> None:
        """It has gone or begins a new run, maybe with the model that is wanted."""
        if not self._until:
            return
        self._until.pop(instance_id, None)
        for targets in self._until.values():
            targets.pop(instance_id, None)


def begins_anew(load: Load, before: Load | None) -> bool:
    """It sleeps, and may wake with other weights; or what it counts is less than it was: it was started again between
    two reports."""
    if not load.awake:
        return True
    return before is not None and load.generation_tokens_total < before.generation_tokens_total
