"""HyperFlexis Fig. 3 with more sequences per engine, a number that the paper does not give: 8, 64 and 256.

The number decides how strong each scheduler is: SCORPIO's guard and Alg. 1's maturity times both pace a small batch
that a large one would not need.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from benchmarks.reproduce.claims import Claim, Plot, Progress, Table, Value
from benchmarks.reproduce.hyperflexis import causes
from benchmarks.reproduce.hyperflexis.multitask import (
    BEHIND,
    BY_CLASS,
    COST,
    HEADLINES,
    LATENCY,
    ROUND_ROBIN,
    SCORPIO,
    Curves,
    best_ratio,
    compared,
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
from benchmarks.reproduce.hyperflexis.stronger import VALUES, Compared, attains, costs, verdict
from controller.simulator.workloads.mixes import MIXES

BATCHES = (8, 64, 256)
TIMES = (1.0, 2.0, 4.5)
LABELS = (ROUND_ROBIN, BY_CLASS, SCORPIO, BEHIND, *OURS)


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
        found: dict[str, Curves] = {}
        for mix, tasks in MIXES.items():
            fixed = fleet(MODELS[model], slots=slots)
            at = knee(fixed, CONTENDERS[ROUND_ROBIN], tasks, per_task, seeds[:1])
            for factor in times:
                requests = of_mix(tasks, at * factor, per_task)
                for label in LABELS:
                    point = measure(fixed, CONTENDERS[label], requests, seeds)
                    found.setdefault(mix, {}).setdefault(label, []).append((factor, point))
                    numbers = [point.attainment, point.spread, point.e2e_s, point.cost, point.work.busy]
                    classes = ", ".join(f"{name} {share:.3f}" for name, share in point.by_class.items())
                    rows.append([slots, mix, round(at, 1), factor, label, *numbers, classes])
            progress(f"{slots} sequences, {mix}: round robin holds 90 % up to {at:.1f} requests/s")
        where = f"{model}, {slots} sequences"
        made += [claim for label in OURS for claim in claims(found, label, where, per_task, seeds)]
    columns = [
        "sequences", "mix", "90 % point, requests/s", "load, x", "scheduler", "attainment", "± std", "mean latency, s",
        "cost, units", "busy share", "attainment by class",
    ]  # fmt: skip
    return made, [Table(f"Fig. 3 by the number of sequences per engine: {model}", columns, rows)], []


def claims(found: Mapping[str, Curves], label: str, where: str, per_task: int, seeds: Sequence[int]) -> list[Claim]:
    """The paper's values over its own baselines on equal fleets, and our bar over the stronger ones."""
    made: list[Claim] = []
    values: tuple[tuple[str, Mapping[tuple[str, str], Mapping[str, float]], Callable[[Point], float]], ...] = (
        ("attainment over {} (factor)", HEADLINES, lambda p: p.attainment),
        ("mean latency below {} (%)", LATENCY, VALUES["mean latency"]),
        ("cost below {} (%)", COST, VALUES["cost"]),
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
                two, others = compared(found[mix], label, against, factor)
                wanted = (1 - theirs / 100) * value(two.other)
                why = ""
                if ours < theirs:
                    why = causes.attainment(two, theirs) if higher else causes.latency(two, wanted, others)
                    why = causes.cost(two, wanted) if headlines is COST else why
                made.append(
                    Claim(
                        "HyperFlexis", _figure(where), f"{label}, {mix}: {text.format(against)}", theirs, ours,
                        ours >= theirs, f"{factor:g} x the 90 % point; {setting}", seeds, why, verdict=verdict(label),
                    )
                )  # fmt: skip
    for mix, by_label in found.items():
        for against in (SCORPIO, BY_CLASS):
            loads = [
                Compared(f"{load:g} x the 90 % point", mine, other)
                for (load, mine), (_, other) in zip(by_label[label], by_label[against], strict=True)
            ]
            name, figure = f"{label}, {mix}", _figure(where)
            made.append(attains(figure, name, against, loads, setting, seeds))
            if against == SCORPIO:
                made += [costs(figure, name, against, loads, what, setting, seeds) for what in VALUES]
    return made


def _figure(where: str) -> str:
    return f"Fig. 3, {where.rpartition(', ')[2]}"
