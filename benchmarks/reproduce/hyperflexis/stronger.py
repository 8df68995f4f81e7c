"""HyperFlexis against baselines that the paper does not have: a bar of our own instead of the paper's values.

The bars are those that the default policy set is built to: no baseline attains noticeably more at any load, and none
is faster or cheaper over all of them.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from benchmarks.reproduce.claims import PRINTED, PRINTED_STRONGER, SET, SET_STRONGER, Claim
from benchmarks.reproduce.hyperflexis.causes import ComparedPair, cost, latency, missed
from benchmarks.reproduce.hyperflexis.setting import OURS, Point

POINTS = -0.5  # attainment at any load, less the baseline's, in points
TIMES = 1.0  # mean latency and cost over the baseline's, mean of all loads
VALUES: Mapping[str, Callable[[Point], float]] = {"mean latency": lambda p: p.e2e_s, "cost": lambda p: p.cost}


class Compared(NamedTuple):
    """One load: ours, and the baseline's, in the same setting with the same requests."""

    where: str
    ours: Point
    theirs: Point

    @property
    def points(self) -> float:
        return 100 * (self.ours.attainment - self.theirs.attainment)


def verdict(label: str, stronger: bool = False) -> str:
    """The kind of verdict on one of ours, whose names begin with that of the scheduler."""
    if label.startswith(OURS[0]):
        return SET_STRONGER if stronger else SET
    return PRINTED_STRONGER if stronger else PRINTED


def attains(
    figure: str, label: str, against: str, compared: Sequence[Compared], setting: str, seeds: Sequence[int]
) -> Claim:
    """Judged at the load where the baseline is furthest ahead."""
    worst = min(compared, key=lambda each: each.points)
    best = max(compared, key=lambda each: each.points)
    behind = sum(each.points < POINTS for each in compared)
    mean = statistics.fmean(each.points for each in compared)
    why = (
        f"behind at {behind} of {len(compared)} loads; {mean:+.1f} points in the mean, "
        f"{best.points:+.1f} at most ({best.where})"
    )
    if worst.points < POINTS:
        why = ". ".join([why, *missed(_pair(label, worst, against))])
    text = f"{label}: attainment less that of {against}, lowest of all loads (points; not in the paper)"
    found = round(worst.points, 2)
    return Claim(
        "HyperFlexis", figure, text, None, found, found >= POINTS, f"{worst.where}; {setting}", seeds, why,
        verdict=verdict(label, True), bar=POINTS,
    )  # fmt: skip


def costs(
    figure: str,
    label: str,
    against: str,
    compared: Sequence[Compared],
    what: str,
    setting: str,
    seeds: Sequence[int],
) -> Claim:
    """`what` (a key of VALUES) over the baseline's, as the geometric mean of all loads at which both are finite."""
    value = VALUES[what]
    finite = {each.where: each for each in compared if math.isfinite(value(each.ours) + value(each.theirs))}
    ratios = {where: value(each.ours) / value(each.theirs) for where, each in finite.items()}
    least, most = (pick(ratios, key=lambda where: ratios[where]) for pick in (min, max))
    found = round(statistics.geometric_mean(ratios.values()), 4)
    why = f"{ratios[least]:.2f} at least ({least}), {ratios[most]:.2f} at most ({most})"
    if len(finite) < len(compared):
        why += f"; at {len(compared) - len(finite)} of {len(compared)} loads one answers nobody"
    if found > TIMES:
        why += f"; {_cause(what, label, finite[most], against)}"
    text = f"{label}: {what} over that of {against}, mean of all loads (factor, at most; not in the paper)"
    return Claim(
        "HyperFlexis", figure, text, None, found, found <= TIMES, setting, seeds, why,
        verdict=verdict(label, True), bar=TIMES,
    )  # fmt: skip


def _cause(what: str, label: str, at: Compared, against: str) -> str:
    pair, wanted = _pair(label, at, against), TIMES * VALUES[what](at.theirs)
    return cost(pair, wanted) if what == "cost" else latency(pair, wanted)


def _pair(label: str, at: Compared, against: str) -> ComparedPair:
    return ComparedPair(label.partition(", ")[0], at.ours, against, at.theirs)
