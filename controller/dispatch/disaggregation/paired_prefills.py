"""How long each prefill instance of pairs has computed: while it did, a pair waited for it, not for a decode instance.

A pair's prefill begins when its decode stage is placed (SGLang takes both stages at once), so behind a full decode
stage the prefill instance is idle, and the wait is that of the decode stage.
"""

from __future__ import annotations


class PairedPrefills:
    """Seconds in which at least one pair was computed, by prefill instance. Times never go backwards."""

    def __init__(self) -> None:
        self._running: dict[str, tuple[int, float]] = {}  # number, and since when there is any
        self._computed: dict[str, float] = {}

    def begins(self, source: str, now: float) -> None:
        number, since = self._running.get(source, (0, now))
        self._running[source] = (number + 1, since)

    def ends(self, source: str, now: float) -> None:
        number, since = self._running.pop(source, (0, now))
        if number > 1:
            self._running[source] = (number - 1, since)
        else:
            self._computed[source] = self._computed.get(source, 0.0) + now - since

    def seconds(self, source: str, now: float) -> float:
        """Up to now, from the first pair on."""
        _, since = self._running.get(source, (0, now))
        return self._computed.get(source, 0.0) + now - since

    def forget(self, source: str) -> None:
        """It is gone, and what ran there."""
        self._computed.pop(source, None)
