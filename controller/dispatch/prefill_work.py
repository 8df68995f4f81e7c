"""What an instance prefilled: how much of its time it took lately, and how long prefills took that ran alone."""

from __future__ import annotations

import math

SAME_BATCH_S = 0.001  # first tokens closer together were computed in one batch
WORK_WINDOW_S = 5.0  # long enough for several prefills, short enough to follow a rise of traffic


class WorkRate:
    """Seconds of work for each second of time, over about the last `WORK_WINDOW_S` (exponentially weighted)."""

    __slots__ = ("_at", "_sum")

    def __init__(self) -> None:
        self._sum = 0.0
        self._at = 0.0

    def add(self, seconds: float, now: float) -> None:
        self._sum = self._sum * self._kept(now) + seconds
        self._at = now

    def value(self, now: float) -> float:
        return self._sum * self._kept(now) / WORK_WINDOW_S

    def _kept(self, now: float) -> float:
        return math.exp((self._at - now) / WORK_WINDOW_S)


class PrefillsAlone:
    """Prefills that an engine ran one after the other since `begun`, while it did nothing else."""

    __slots__ = ("batches", "begun", "squares", "tokens", "until")

    def __init__(self, begun: float) -> None:
        self.begun = self.until = begun
        self.batches = self.tokens = self.squares = 0

    def add(self, tokens: int, squares: int, now: float) -> None:
        """One prefill ended. Those that end together were one batch."""
        if now - self.until > SAME_BATCH_S or not self.batches:
            self.batches += 1
        self.until = now
        self.tokens += tokens
        self.squares += squares

    @property
    def seconds(self) -> float:
        return self.until - self.begun
