"""HyperFlexis Fig. 7: one task against single-task schedulers, each at the best of its own settings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from benchmarks.reproduce.claims import Claim, Plot, Progress, Table, Value
from benchmarks.reproduce.hyperflexis.setting import (
    CONTENDERS,
    MODELS,
    OURS,
    HyperFlexisModel,
    fleet,
    instance,
    knee,
    measure,
    of_mix,
)
from benchmarks.reproduce.hyperflexis.stronger import verdict
from controller.core.types import Targets
from controller.simulator.experiment import Contender
from controller.simulator.workloads.mixes import FOUR_TASKS, PATIENT_S

FIG7_TIMES = (0.8, 1.0, 1.2, 1.5, 2.0)  # multiples of hyperflexis' own 90 % point, which the paper gives in requests/s
SWEPT = (1.15, 2.0)  # multiples of the paper's rate
FIG7_QPS = {"Qwen7B": 40.0, "Qwen32B": 12.0}
WIKISQL = replace(FOUR_TASKS[3], targets=Targets(0.7, 0.5, None, PATIENT_S))
PRINTED, ROUND_ROBIN, BY_CLASS = "hyperflexis (as printed)", "round robin", "engine priority by class"
SAME_POINT = 0.97  # at least the baseline's 90 % point: the search for it ends within 3 %
ALADDIN, ANNEALING = "ALADDIN", "simulated annealing"
BUILT = "ALADDIN and the annealer could only be built from abstracts, summaries and HyperFlexis' description of them"
AT_PARTS = (1.0, 1.2)  # times the 90 % point of the printed policy


def annealing(model: HyperFlexisModel, **settings: float) -> Contender:
    """The annealed order in each engine, with the profile; requests go to the instance with the fewest."""
    known = instance(model).latency
    told = {
        "prefill_a": known.prefill_a,
        "prefill_b": known.prefill_b,
        "decode_s": known.decode_a + 32 * known.decode_c,
    }
    engine = {"batching": "simulated_annealing", "batching_settings": {**told, **settings}}
    return Contender(ANNEALING, "least_outstanding", {}, engine)


def candidates(model: HyperFlexisModel) -> dict[str, list[tuple[str, Contender]]]:
    """The settings of each system, by name."""
    fits: list[tuple[str, Contender]] = []
    for fit in ("worst", "best"):
        for ttft in (1.0, 0.5):
            overrides = {"routing": {"fit": fit}, "pacing": {"ttft_share": ttft}}
            fits.append((f"{fit} fit, ttft_share {ttft:g}", Contender(ALADDIN, "aladdin", overrides)))
    orders = [("defaults", annealing(model))]
    for setting, values in (("iterations", (20, 400)), ("window", (8, 128)), ("temperature", (0.005, 0.5))):
        orders += [(f"{setting} {value:g}", annealing(model, **{setting: value})) for value in values]
    orders.append(("window 128, iterations 400", annealing(model, window=128, iterations=400)))
    return {ALADDIN: fits, ANNEALING: orders}


def best_single(model: HyperFlexisModel, count: int, seeds: Sequence[int]) -> tuple[dict[str, Contender], Table]:
    """Every setting just above the knee, where the 90 % points are decided, and at twice the paper's rate.

    The best attains most just above the knee, then at twice the rate.
    """
    rates = tuple(factor * FIG7_QPS[model.name] for factor in SWEPT)
    rows: list[list[Value]] = []
    found: dict[str, Contender] = {}
    for label, cases in candidates(model).items():
        scores = []
        for name, contender in cases:
            points = [measure(fleet(model), contender, of_mix((WIKISQL,), rate, count), seeds) for rate in rates]
            scores.append(tuple(round(point.attainment, 6) for point in points))
            rows.append([label, name, *(value for point in points for value in (point.attainment, point.e2e_s))])
        best = max(range(len(scores)), key=lambda index: (scores[index], -index))
        found[label] = cases[best][1]
        rows[best - len(cases)][1] = f"{cases[best][0]} (taken)"
    shown = (f"{what} at {rate:g}/s" for rate in rates for what in ("attainment", "mean latency, s,"))
    title = f"Sweep of the single-task schedulers: {model.name}, WikiSQL alone, seeds {', '.join(map(str, seeds))}"
    return found, Table(title, ["system", "settings", *shown], rows)


def parts(model: HyperFlexisModel, rate: float, count: int, seeds: Sequence[int]) -> Table:
    """Where the printed policy falls behind round robin: the policy with one part exchanged at a time."""
    printed = CONTENDERS[PRINTED]
    cases: Mapping[str, Contender] = {
        ROUND_ROBIN: CONTENDERS[ROUND_ROBIN],
        PRINTED: printed,
        "sends at every event (`backlog`) instead of at maturity times": replace(
            printed, overrides={"pacing": {"name": "backlog"}}
        ),
        "sends all at once (`unlimited`)": replace(printed, overrides={"pacing": {"name": "unlimited"}}),
        "admits everybody (`admit_all`)": replace(printed, overrides={"admission": {"name": "admit_all"}}),
        "to the instance with the fewest (`least_outstanding`)": replace(
            printed, overrides={"routing": {"name": "least_outstanding"}}
        ),
        "cheapest first (`apparent_tardiness_cost`)": replace(
            printed, overrides={"ordering": {"name": "apparent_tardiness_cost"}}
        ),
        "slackline's order (`feasible_deadlines`)": replace(
            printed, overrides={"ordering": {"name": "feasible_deadlines"}}
        ),
    }
    rows: list[list[Value]] = []
    for label, contender in cases.items():
        row: list[Value] = [label]
        for factor in AT_PARTS:
            point = measure(fleet(model), contender, of_mix((WIKISQL,), rate * factor, count), seeds, keep=True)
            firsts = sorted(r.ttft_s for result in point.results for r in result.records if r.ttft_s is not None)
            row += [point.attainment, firsts[len(firsts) // 2], point.e2e_s]
        rows.append(row)
    columns = ["scheduler", *(f"{f:g} x: {what}" for f in AT_PARTS for what in ("attainment", "median TTFT, s",
               "mean latency, s"))]  # fmt: skip
    title = f"Fig. 7, {model.name}: the printed policy with one part exchanged at a time; 1 x = {rate:.1f} requests/s"
    return Table(title, columns, rows)


def exchanged(table: Table) -> str:
    """What `parts` measured at the highest load, as the cause of a miss of the printed policy."""
    met = {str(row[0]): float(row[-3] or 0.0) for row in table.rows}
    others = "; ".join(f"{label} {value:.3f}" for label, value in met.items() if label not in (PRINTED, ROUND_ROBIN))
    load = f"{AT_PARTS[-1]:g} times its 90 % point"
    return (
        f"at {load} the policy as printed attains {met[PRINTED]:.3f} and round robin {met[ROUND_ROBIN]:.3f}; "
        f"the policy with one part exchanged: {others}"
    )


def figure_7(
    progress: Progress, models: Sequence[str], times: Sequence[float], count: int, seeds: Sequence[int]
) -> tuple[list[Claim], list[Table], list[Plot]]:
    claims: list[Claim] = []
    tables: list[Table] = []
    plots: list[Plot] = []
    for name in models:
        model = MODELS[name]
        best, sweep = best_single(model, count, seeds)
        progress(f"Fig. 7: sweep of {name}")
        fixed = fleet(model)
        contenders = {label: CONTENDERS[label] for label in (ROUND_ROBIN, BY_CLASS, *OURS)} | best
        near = FIG7_QPS[name] / 2
        knees = {label: knee(fixed, each, (WIKISQL,), count, seeds, near) for label, each in contenders.items()}
        at = knees[PRINTED]
        rows: list[list[Value]] = []
        series: dict[str, list[tuple[float, float]]] = {}
        for label, each in contenders.items():
            points = [measure(fixed, each, of_mix((WIKISQL,), at * factor, count), seeds) for factor in times]
            rows.append([label, knees[label], *(f"{p.attainment:.3f}, {p.e2e_s:.1f} s" for p in points)])
            series[label] = [(at * factor, point.attainment) for factor, point in zip(times, points, strict=True)]
        columns = ["scheduler", "90 % point, requests/s", *(f"{factor:g} x: attainment, latency" for factor in times)]
        tables.append(Table(f"Fig. 7, {name}: WikiSQL alone, TTFT 0.7 s; 1 x = {at:.1f} requests/s", columns, rows))
        by_part = parts(model, at, count, seeds)
        tables += [sweep, by_part]
        label = f"hyperflexis-fig7-{name}".lower()
        plots.append(Plot(label, f"HyperFlexis Fig. 7: {name}", "requests/s", "SLO attainment", series, level=0.9))
        claims += single_claims(name, knees, seeds, exchanged(by_part))
        progress(f"Fig. 7: {name}")
    return claims, tables, plots


def single_claims(name: str, knees: Mapping[str, float], seeds: Sequence[int], cause: str) -> list[Claim]:
    """Ratios of 90 % points by a bar of ours: ALADDIN and the annealer are built from descriptions, round robin is not
    in the paper's figure. With one task the engine's priority by class is round robin, so it has no claim of its own.
    `cause`: what was measured of the printed policy's parts.
    """
    setting = f"{name}, WikiSQL alone, 2 workers, 90 % points; ALADDIN and the annealer at the best of their sweep"
    made = []
    for ours in OURS:
        for other in (ALADDIN, ANNEALING, ROUND_ROBIN):
            ratio = round(knees[ours] / knees[other], 3)
            reached = ratio >= SAME_POINT
            reason = [BUILT] if other in (ALADDIN, ANNEALING) else []
            if not reached:
                reason.append(f"not at least as effective{': ' + cause if ours == PRINTED else ''}")
            text = f"{ours}: rate at 90 % over that of {other} (factor; the paper: at least as effective)"
            if other == ROUND_ROBIN:
                text = f"{ours}: rate at 90 % over that of {other} (factor; not in the paper)"
            why, kind = ". ".join(reason), verdict(ours, True)
            made.append(
                Claim(
                    "HyperFlexis", "Fig. 7", text, None, ratio, reached, setting, seeds, why, verdict=kind,
                    bar=SAME_POINT,
                )
            )  # fmt: skip
    text = f"{PRINTED}: {name}, 90 % point on WikiSQL alone (requests/s)"
    why = "the profile's factor was chosen for this, so that our requests/s can be compared with the paper's"
    found = round(knees[PRINTED], 2)
    made.append(Claim("HyperFlexis", "Fig. 7", text, FIG7_QPS.get(name), found, None, setting, seeds, why))
    return made
