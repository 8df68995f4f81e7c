"""The speed of a machine over time, measured from the records of served requests.

Fitted step times are a mean. A shared or virtual machine pauses and catches up for tenths of a second to seconds, and
this changes queues, which the scatter of single steps does not. For each decode interval, the work in it (in seconds of
the fitted model) is the integral of the speed over it. Speeds by period (1 = as fitted) follow from all overlapping
intervals of an engine by maximum likelihood for such sums (multiplicative, so never negative). They are smoothed in
each round, because what the intervals leave open would otherwise alternate between zero and bursts (the EMS algorithm:
Silverman, Jones, Wilson and Nychka, J. R. Statist. Soc. B 52, 1990, 271-324).

Clients see tokens later than engines make them, so a pause of the client or the gateway looks like one of the engine.
Cost: rounds x overlaps of intervals and periods.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from controller.core.errors import ConfigError

ROUNDS = 60
SMOOTHING = 0.02  # weight of each neighbour, per round
SLOWEST, FASTEST = 0.02, 4.0  # higher speeds come from what the intervals leave open, not from the machine


class Interval(NamedTuple):
    """Begin and end in seconds on the run's clock, and the seconds that the fitted model expects for the work in
    between.
    """

    begin: float
    end: float
    work_s: float


def speed_over_time(intervals: Sequence[Interval], period_s: float) -> list[float]:
    """Speed in each period from 0 to the last end; 1 before the first interval.

    The total work of all intervals is met exactly. Raises ConfigError if there is no work.
    """
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
    """Mixes in a little of each neighbour; the two ends use themselves in place of the missing one."""
    before, after = [values[0], *values[:-1]], [*values[1:], values[-1]]
    return [v + SMOOTHING * (a - 2 * v + b) for a, v, b in zip(before, values, after, strict=True)]
