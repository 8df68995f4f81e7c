"""Finds the knee, the rate at which attainment first drops below a level, with as few runs as possible."""

from __future__ import annotations

from collections.abc import Callable

LEVEL = 0.9


class NoKnee(RuntimeError):
    """Attainment never crossed the level between the bounds."""


def find_knee(
    measure: Callable[[float], float], start: float, factor: float = 1.15, level: float = LEVEL, bound: float = 8.0
) -> tuple[float, list[tuple[float, float]]]:
    """The knee and every measured (rate, attainment), by rate.

    Goes from `start` in steps of `factor`, down while below the level and up otherwise, until two neighbouring rates
    are on different sides; the knee is interpolated between them. Raises NoKnee beyond `bound` times (or one `bound`-th
    of) the start.
    """
    measured = {start: measure(start)}
    upwards = measured[start] >= level
    rate = start
    while (measured[rate] >= level) == upwards:
        following = rate * factor if upwards else rate / factor
        if not 1 / bound <= following / start <= bound:
            raise NoKnee(f"attainment {measured[rate]:.2f} at {rate:.1f} requests/s, still no knee at {level}")
        measured[following] = measure(following)
        rate, before = following, rate
    good, bad = (before, rate) if upwards else (rate, before)
    share = (measured[good] - level) / (measured[good] - measured[bad])
    return good + share * (bad - good), sorted(measured.items())
