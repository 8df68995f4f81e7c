"""HyperFlexis Fig. 3 with more sequences per engine, a number that the paper does not give: 8, 64 and 256.

The number decides how strong each scheduler is: SCORPIO's guard and Alg. 1's maturity times both pace a small batch
that a large one would not need.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from benchmarks.reproduce.claims import Claim, Plot, Progress, Table, Value
from benchmarks.reproduce.hyperflexis.multitask import (
    BEHIND,
    BY_CLASS,
    COST,
    HEADLINES,
    LATENCY,
    ROUND_ROBIN,
    SCORPIO,
    best_ratio,
)
from benchmarks.reproduce.hyperflexis.setting import (
    CONTENDERS,
    MODELS,
    OURS,
    Point,
    fleet,
    knee,
    measure,
    of_mix,
)
from benchmarks.reproduce.hyperflexis.stronger import Compared, attains, costs, verdict
from controller.simulator.workloads.mixes import MIXES

BATCHES = (8, 64, 256)
TIMES = (1.0, 2.0, 4.5)
LABELS = (ROUND_ROBIN, BY_CLASS, SCORPIO, BEHIND, *OURS)
Measured = Mapping[str, dict[str, list[tuple[float, Point]]]]  # by mix and scheduler: load and point


def reproduce(
    progress: Progress,
    model: str,
    times: Sequence[float],
    per_task: int,
    seeds: Sequence[int],
    batches: Sequence[int] = BATCHES,
) -> tuple[list[Claim], list[Table], list[Plot]]:
    made: list[Claim] = []
    rows: list[list[Value]] = []
    for slots in batches:
        found: dict[str, dict[str, list[tuple[float, Point]]]] = {}
        for mix, tasks in MIXES.items():
            fixed = fleet(MODELS[model], slots=slots)
            at = knee(fixed, CONTENDERS[ROUND_ROBIN], tasks, per_task, seeds[:1])
            for factor in times:
                requests = of_mix(tasks, at * factor, per_task)
                for label in LABELS:
                    point = measure(fixed, CONTENDERS[label], requests, seeds, keep=True)
                    found.setdefault(mix, {}).setdefault(label, []).append((factor, replace(point, results=())))
                    numbers = [point.attainment, point.spread, point.e2e_s, point.cost, busy(point)]
                    rows.append([slots, mix, round(at, 1), factor, label, *numbers])
            progress(f"{slots} sequences, {mix}: round robin holds 90 % up to {at:.1f} requests/s")
        where = f"{model}, {slots} sequences"
        made += [claim for label in OURS for claim in claims(found, label, where, per_task, seeds)]
    columns = [
        "sequences", "mix", "90 % point, requests/s", "load, x", "scheduler", "attainment", "± std", "mean latency, s",
        "cost, units", "busy share",
    ]  # fmt: skip
    return made, [Table(f"Fig. 3 by the number of sequences per engine: {model}", columns, rows)], []


def busy(point: Point) -> float:
    """Share of the instances' time in which a step ran."""
    uses = [use for result in point.results for use in result.instances]
    return sum(use.busy_s for use in uses) / sum(use.provisioned_s for use in uses)


def claims(found: Measured, label: str, where: str, per_task: int, seeds: Sequence[int]) -> list[Claim]:
    """The paper's values over its own baselines on equal fleets, and our bar over the stronger ones."""
    made: list[Claim] = []
    values: tuple[tuple[str, Mapping[tuple[str, str], Mapping[str, float]], Callable[[Point], float]], ...] = (
        ("attainment over {} (factor)", HEADLINES, lambda p: p.attainment),
        ("mean latency below {} (%)", LATENCY, lambda p: p.e2e_s),
        ("cost below {} (%)", COST, lambda p: p.cost),
    )
    setting = f"{where}, {per_task} a task, Poisson"
    for text, headlines, value in values:
        for (fleet_of, against), by_mix in headlines.items():
            for mix, theirs in by_mix.items() if fleet_of == "{}" else ():
                each = {where: found[mix]}
                higher = headlines is HEADLINES
                pair = (label, against) if higher else (against, label)
                ratio, _, factor = best_ratio(each, *pair, value)
                ours = round(ratio if higher else 100 * (1 - 1 / ratio), 4)
                at = next(point for load, point in found[mix][against] if load == factor)
                own = next(point for load, point in found[mix][label] if load == factor)
                why = "" if ours >= theirs else (
                    f"attained there {own.attainment:.3f} and {at.attainment:.3f}, in {own.e2e_s:.1f} and "
                    f"{at.e2e_s:.1f} s"
                )  # fmt: skip
                made.append(
                    Claim(
                        "HyperFlexis", _figure(where), f"{label}, {mix}: {text.format(against)}", theirs, ours,
                        ours >= theirs, f"{factor:g} x the 90 % point; {setting}", seeds, why, verdict=verdict(label),
                    )
                )  # fmt: skip
    for mix, by_label in found.items():
        for against in (SCORPIO, BY_CLASS):
            compared = [
                Compared(f"{factor:g} x the 90 % point", mine, other)
                for (factor, mine), (_, other) in zip(by_label[label], by_label[against], strict=True)
            ]
            name, figure = f"{label}, {mix}", _figure(where)
            made.append(attains(figure, name, against, compared, setting, seeds))
            if against == SCORPIO:
                for what, value in (("mean latency", lambda p: p.e2e_s), ("cost", lambda p: p.cost)):
                    made.append(costs(figure, name, against, compared, what, value, setting, seeds))
    return made


def _figure(where: str) -> str:
    return f"Fig. 3, {where.rpartition(', ')[2]}"
