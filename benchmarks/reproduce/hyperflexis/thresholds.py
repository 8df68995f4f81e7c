"""The scaler's thresholds, which HyperFlexis does not give: swept for disaggregated stages and for growing fleets.

The rule was fixed before the sweep: of all candidates whose attainment, in the mean of the loads, is within `SLACK` of
the best, the one that costs least. The sweep's seed is none of the comparison's.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from benchmarks.reproduce.claims import Table, Value
from benchmarks.reproduce.hyperflexis.setting import CONTENDERS, Point, measure
from controller.simulator import Demand, SimulationSettings

SLACK = 0.01
SEED = 7
Thresholds = Mapping[str, float]
CANDIDATES: tuple[Thresholds, ...] = tuple(
    {"upper": upper, "lower": lower, "sustain_s": sustain_s}
    for upper, lower, sustain_s in ((0.8, 0.3, 5.0), (1.0, 0.5, 2.0), (1.5, 0.6, 1.0), (2.0, 0.8, 1.0), (4.0, 1.0, 1.0))
)


class Swept(NamedTuple):
    """One load of the sweep. `settings`: the growing fleet with the given thresholds; `fixed`: round robin's."""

    where: str
    settings: Callable[[Thresholds], SimulationSettings]
    fixed: SimulationSettings
    requests: Callable[[int], Sequence[Demand]]


def sweep(scheduler: str, loads: Sequence[Swept], title: str) -> tuple[Thresholds, Table]:
    """The thresholds to use for `scheduler`, and every candidate: attainment, and cost over round robin's by load."""
    base = [measure(load.fixed, CONTENDERS["round robin"], load.requests, (SEED,)).cost for load in loads]
    rows: list[list[Value]] = []
    scores: list[tuple[float, float]] = []
    for each in CANDIDATES:
        points = [measure(load.settings(each), CONTENDERS[scheduler], load.requests, (SEED,)) for load in loads]
        ratios = [point.cost / cost for point, cost in zip(points, base, strict=True)]
        scores.append(score(points, ratios))
        shown = (f"{point.attainment:.3f}, {ratio:.2f}" for point, ratio in zip(points, ratios, strict=True))
        rows.append([each["upper"], each["lower"], each["sustain_s"], *scores[-1], *shown])
    taken = CANDIDATES[chosen(scores)]
    columns = [
        "scales out above", "scales in below", "for, s", "mean attainment", "mean cost over round robin's",
        *(f"{load.where}: attainment, cost" for load in loads),
    ]  # fmt: skip
    name = f"{title}, {scheduler}: taken are {taken['upper']:g}, {taken['lower']:g}, {taken['sustain_s']:g} s"
    return taken, Table(name, columns, rows)


def score(points: Sequence[Point], ratios: Sequence[float]) -> tuple[float, float]:
    """Mean attainment and mean cost over the loads."""
    return statistics.fmean(point.attainment for point in points), statistics.fmean(ratios)


def chosen(scores: Sequence[tuple[float, float]]) -> int:
    """By the rule above; the first of equals."""
    best = max(attained for attained, _ in scores)
    enough = [index for index, (attained, _) in enumerate(scores) if attained >= best - SLACK]
    return min(enough, key=lambda index: scores[index][1])
