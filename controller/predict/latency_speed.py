"""How fast a machine really ran, over time, from the records of served requests: its own scatter, measured.

Fitted step times are a mean; a shared or virtual machine now pauses, now catches up, for tenths of a second to seconds,
and queues feel that where they do not feel the scatter of single steps. Each decode interval says: the work in it, in
seconds of the fitted model, is the integral of the speed over it. Speeds by period (1 = as fitted) follow from all
overlapping intervals of an engine by maximum likelihood for such sums (multiplicative, so never negative), smoothed
once a round, since what the intervals leave open would otherwise alternate between nothing and bursts (the EMS
algorithm: Silverman, Jones, Wilson and Nychka, J. R. Statist. Soc. B 52, 1990, 271-324).

Clients see tokens later than engines make them: a pause of client or gateway reads as one of the engine. Cost: rounds x
overlaps of intervals and periods.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from controller.core.errors import ConfigError

ROUNDS = 60
SMOOTHING = 0.02  # of each neighbour, a round
SLOWEST, FASTEST = 0.02, 4.0  # a speed beyond is what the intervals leave open, not the machine


class Interval(NamedTuple):
    """Seconds on the run's clock, and what the fitted model says the work in between takes."""

    begin: float
    end: float
    work_s: float


def speed_over_time(intervals: Sequence[Interval], period_s: float) -> list[float]:
    """Speed in each period from 0 to the last end; 1 before anything is known of a period. The work of all intervals
    together is met exactly. Raises ConfigError without work."""
    seen = [each for each in intervals if each.end > each.begin >= 0 and each.work_s > 0]
    if not seen or not period_s > 0:
        raise ConfigError("a speed needs intervals with work in them, and a period", field="records")
    periods = math.ceil(max(each.end for each in seen) / period_s)
    overlaps = [_overlaps(each, period_s, periods) for each in seen]
    covered = [0.0] * periods
    for overlap in overlaps:
        for k, seconds in overlap:
            covered[k] += seconds
    level = sum(each.work_s for each in seen) / sum(covered)
    speeds = [level] * periods
    for _ in range(ROUNDS):
        ratios = [0.0] * periods
        for each, overlap in zip(seen, overlaps, strict=True):
            ratio = each.work_s / sum(seconds * speeds[k] for k, seconds in overlap)
            for k, seconds in overlap:
                ratios[k] += seconds * ratio
        speeds = [v * r / c if c > 0 else v for v, r, c in zip(speeds, ratios, covered, strict=True)]
        speeds = [min(FASTEST, max(SLOWEST, v)) for v in _smoothed(speeds)]
    met = sum(seconds * speeds[k] for overlap in overlaps for k, seconds in overlap)
    factor = sum(each.work_s for each in seen) / met
    return [v * factor if c > 0 else 1.0 for v, c in zip(speeds, covered, strict=True)]


def _overlaps(each: Interval, period_s: float, periods: int) -> list[tuple[int, float]]:
    first, last = int(each.begin / period_s), min(periods - 1, int(each.end / period_s))
    found = [(k, min(each.end, (k + 1) * period_s) - max(each.begin, k * period_s)) for k in range(first, last + 1)]
    return [(k, seconds) for k, seconds in found if seconds > 0]


def _smoothed(values: Sequence[float]) -> list[float]:
    """A little of each neighbour; the ends keep themselves for the one they lack."""
    before, after = [values[0], *values[:-1]], [*values[1:], values[-1]]
    return [v + SMOOTHING * (a - 2 * v + b) for a, v, b in zip(before, values, after, strict=True)]
