"""Kairos' online table of decode step times (Alg. 3): the mean of the observations, or the profile if there are
none.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

PROFILED_RUNS = 100


class KairosProfile(Protocol):
    def parts(self, batch: int) -> tuple[float, float, float]:
        """base, slope, fixed: a step of `batch` takes base + slope x longest + fixed seconds, added in this order;
        slope >= 0.
        """
        ...


class StepTable:
    """Mean step seconds by (batch, length); where nothing was observed, those of the profile."""

    def __init__(self, profile: Callable[[int, int], float], bucket: int = 1) -> None:
        self.profile = profile
        self.bucket = bucket
        self._rows: list[dict[int, tuple[float, int]]] = []

    def rows(self, batch: int) -> Sequence[Mapping[int, tuple[float, int]]]:
        """`row` by batch size, up to `batch` at least; the table's own list."""
        while len(self._rows) <= batch:
            self._rows.append({})
        return self._rows

    def row(self, batch: int) -> Mapping[int, tuple[float, int]]:
        """(mean, count) of observed steps of `batch`, by bucket."""
        return self.rows(batch)[batch]

    def seconds(self, batch: int, length: int) -> float:
        entry = self.row(batch).get(length // self.bucket)
        return entry[0] if entry is not None else self.profile(batch, length)

    def observe(self, batch: int, length: int, seconds: float) -> None:
        """Add a sample of a step of `batch` sequences, the longest of `length` tokens."""
        self.rows(batch)
        row, key = self._rows[batch], length // self.bucket
        mean, count = row.get(key, (self.profile(batch, length), PROFILED_RUNS))
        row[key] = (mean + (seconds - mean) / (count + 1), count + 1)
