"""Compares two runs of the same arrivals, seed by seed: is the second at least as good?"""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from benchmarks.reproduce.claims import SET, Claim

FIGURES = 4  # of a printed number
WITHIN = "behind, but by less than one standard error of the seeds' differences"


def compare(
    home: str,
    what: str,
    setting: str,
    theirs: Sequence[float],
    ours: Sequence[float],
    seeds: Sequence[int],
    reason: str = "",
) -> Claim:
    """Paired by seed; `reason` is given if ours is behind by more than the standard error of the differences."""
    differences = [here - there for here, there in zip(ours, theirs, strict=True)]
    error = statistics.stdev(differences) / len(differences) ** 0.5 if len(differences) > 1 else 0.0
    lost = statistics.fmean(differences) < -error
    own, mine = short(statistics.fmean(theirs)), short(statistics.fmean(ours))
    why = reason if lost else WITHIN if statistics.fmean(differences) < 0 else ""
    return Claim("Combined", home, what, own, mine, not lost, setting, tuple(seeds), why, verdict=SET)


def short(value: float) -> float:
    return float(f"{value:.{FIGURES}g}")
