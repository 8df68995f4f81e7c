"""Kairos' choice of decodes (Alg. 3), plainly, and its table of step times. For an engine: kairos_standing.py."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

PROFILED_RUNS = 100
Means = npt.NDArray[np.float64]


class Profile(Protocol):
    def parts(self, batch: int) -> tuple[float, float, float]:
        """base, slope, fixed: a step of `batch` takes base + slope x longest + fixed seconds, added in this order; the
        slope is not negative."""
        ...


class StepTable:
    """Mean step seconds by (batch, length). What was never observed is the profile's."""

    def __init__(self, profile: Callable[[int, int], float], bucket: int = 1) -> None:
        self.profile = profile
        self.bucket = bucket
        self._means = np.full((0, 0), np.nan)  # by batch and bucket of lengths
        self._counts: dict[tuple[int, int], int] = {}

    def means(self, batch: int, length: int) -> Means:
        """What was observed, by batch and bucket of lengths, up to these at least; not a number where nothing was."""
        rows, columns = self._means.shape
        wanted = batch + 1, length // self.bucket + 1
        if wanted[0] > rows or wanted[1] > columns:
            grown = np.full((max(rows, wanted[0]), max(columns, wanted[1])), np.nan)
            grown[:rows, :columns] = self._means
            self._means = grown
        return self._means

    def seconds(self, batch: int, length: int) -> float:
        key = batch, length // self.bucket
        return float(self._means[key]) if key in self._counts else self.profile(batch, length)

    def observe(self, batch: int, length: int, seconds: float) -> None:
        """One more sample of a step of `batch` sequences, the longest of `length` tokens."""
        mean, key = self.seconds(batch, length), (batch, length // self.bucket)
        count = self._counts.get(key, PROFILED_RUNS)
        self.means(batch, length)[key] = mean + (seconds - mean) / (count + 1)
        self._counts[key] = count + 1


class Active(NamedTuple):
    """A decoding sequence: `generated` decode tokens since the one that prefill gave. Order: by length, then id."""

    length: int
    id: str
    first_token_at: float
    generated: int
    tpot_s: float


def slack(active: Active, reserved_s: float, now: float) -> float:
    """Eq. 2, seconds."""
    return active.tpot_s * (active.generated + 1) - (now - active.first_token_at) - reserved_s


def choose(actives: Sequence[Active], table: StepTable, now: float, reserve: str = "active") -> list[Active]:
    """Alg. 3: who decodes in this step, ascending by length. Never empty while anybody is active."""
    ordered = sorted(actives)
    batch = len(ordered) if reserve == "active" else 1
    least = min((slack(each, table.seconds(batch, each.length), now) for each in ordered), default=math.inf)
    joined: list[Active] = []
    throughput = 0.0
    for each in ordered:
        step = table.seconds(len(joined) + 1, each.length)
        if step <= least and (len(joined) + 1) / step > throughput:
            joined.append(each)
            throughput = len(joined) / step
    return joined or ordered
