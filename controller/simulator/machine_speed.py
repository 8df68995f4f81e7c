"""A machine whose speed varies as measured: pauses and slow stretches on top of the fitted step times.

There is one series of speeds by period for each instance (1 = as fitted; `controller/predict/latency_speed.py` measures
them). All start at the same moment, so that what slowed the instances of a machine together does so here. A run repeats
them in a circle from a moment drawn with its seed; nothing else is random.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

import numpy as np

from controller.core.errors import ConfigError


@dataclass(frozen=True, slots=True)
class MachineSpeed:
    """`series` by instance (further instances use them again from the first), each of any length.

    `begin_s`: where in the circle of the first series a run begins.
    """

    series: tuple[tuple[float, ...], ...]
    period_s: float = 0.5
    begin_s: float = 0.0

    def __post_init__(self) -> None:
        if not (math.isfinite(self.period_s) and self.period_s > 0):
            raise ConfigError("period_s must be positive seconds", field="period_s")
        if not self.series or not all(self.series):
            raise ConfigError("series needs speeds, a list of them an instance", field="series")
        for speeds in self.series:
            if not all(math.isfinite(speed) and speed >= 0 for speed in speeds) or sum(speeds) <= 0:
                raise ConfigError("speeds must be 0 or more, and not all 0", field="series")
        if not (math.isfinite(self.begin_s) and self.begin_s >= 0):
            raise ConfigError("begin_s must be 0 s or more", field="begin_s")

    def drawn(self, seed: int) -> MachineSpeed:
        """The same, with a random begin within the first series."""
        length = len(self.series[0]) * self.period_s
        return replace(self, begin_s=float(np.random.default_rng([seed, 21]).uniform(0.0, length)))

    def of(self, slot: int) -> SpeedClock:
        return SpeedClock(self.series[slot % len(self.series)], self.period_s, self.begin_s)


class SpeedClock:
    """When work ends on one machine. Cost: O(log periods) per question."""

    __slots__ = ("_begin", "_done", "_length", "_period", "_total")

    def __init__(self, speeds: Sequence[float], period_s: float, begin_s: float) -> None:
        self._done = [0.0, *accumulate(speed * period_s for speed in speeds)]  # work done by the end of each period
        self._total, self._period = self._done[-1], period_s
        self._length, self._begin = len(speeds) * period_s, begin_s

    def after(self, at: float, seconds: float) -> float:
        """When `seconds` of work (as fitted) that began at `at` are done."""
        if seconds <= 0:
            return at
        rounds, within = divmod(at + self._begin, self._length)
        rounds_of_work, left = divmod(self._work_by(within) + seconds, self._total)
        return max(at, (rounds + rounds_of_work) * self._length + self._when(left) - self._begin)

    def _work_by(self, within: float) -> float:
        k = min(len(self._done) - 2, int(within / self._period))
        return self._done[k] + (within / self._period - k) * (self._done[k + 1] - self._done[k])

    def _when(self, work: float) -> float:
        k = max(1, bisect_left(self._done, work))
        before, by = self._done[k - 1], self._done[k]
        return (k - 1 + (work - before) / (by - before)) * self._period if work > 0 else 0.0
