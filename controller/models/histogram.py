"""Buckets of the latency histograms in the roll-up by minute. Their bounds are part of the stored data."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

# Upper bounds in seconds, so close that a quantile read from them is off by at most a quarter.
BOUNDS_S: tuple[float, ...] = (
    0.001, 0.002, 0.003, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.7, 1.0,
    1.4, 2.0, 3.0, 4.0, 5.0, 7.0, 10.0, 14.0, 20.0, 30.0, 45.0, 60.0, 120.0, 300.0,
)  # fmt: skip
SIZE = len(BOUNDS_S) + 1  # the last bucket has no upper bound


def empty() -> list[int]:
    return [0] * SIZE


def bucket(seconds: float) -> int:
    return bisect_left(BOUNDS_S, seconds)


def quantile(counts: Sequence[int], share: float) -> float | None:
    """The number of seconds below which `share` (0 to 1) of the counts lie, interpolated in its bucket; None without
    counts. In the unbounded bucket it is the lower bound.
    """
    total = sum(counts)
    if total == 0:
        return None
    rank, seen = share * total, 0
    for index, count in enumerate(counts):
        if count and seen + count >= rank:
            low = BOUNDS_S[index - 1] if index else 0.0
            high = BOUNDS_S[index] if index < len(BOUNDS_S) else low
            return low + (high - low) * max(rank - seen, 0.0) / count
        seen += count
    return BOUNDS_S[-1]
