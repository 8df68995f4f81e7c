"""HyperFlexis Fig. 8 (intervals) and Table 2 (load times)."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import replace

from benchmarks.reproduce.claims import SET, Claim, Plot, Progress, Table, Value
from benchmarks.reproduce.hyperflexis.setting import (
    CONTENDERS,
    MODELS,
    OURS,
    fleet,
    growing,
    measure,
    of_mix,
    round_robin_knee,
)
from benchmarks.reproduce.hyperflexis.stronger import verdict
from controller.simulator.report.summary import time_to_scale
from controller.simulator.workloads.mixes import MIXES

BY_CLASS = "engine priority by class"
TELEMETRY_S = (0.05, 1.0, 5.0)
SCALING_S = (0.5, 1.0, 2.0)
START_S, WARM = (
    15.0,
    2,
)  # start of a process without weights (assumed, the paper has no figure), and number of warm spares


def figure_8(
    progress: Progress, name: str, times: Sequence[float], per_task: int, seeds: Sequence[int]
) -> tuple[list[Claim], list[Table], list[Plot]]:
    """How little the periods of telemetry and scaler matter."""
    model, tasks = MODELS[name], MIXES["4-task"]
    at = round_robin_knee(name, "4-task", per_task, tuple(seeds))
    claims: list[Claim] = []
    rows: list[list[Value]] = []
    cases = {
        "monitor": [(f"{s:g} s", fleet(model, telemetry_period_s=s)) for s in TELEMETRY_S],
        "scaling": [(f"{s:g} s", fleet(model, elastic=growing(model, interval_s=s))) for s in SCALING_S],
    }
    for what, settings in cases.items():
        for ours in OURS:
            spreads = []
            for factor in times:
                requests = of_mix(tasks, at * factor, per_task)
                points = {label: measure(each, CONTENDERS[ours], requests, seeds) for label, each in settings}
                rows += [[what, label, ours, factor, p.attainment, p.e2e_s, p.cost] for label, p in points.items()]
                met = [point.attainment for point in points.values()]
                spreads.append(100 * (max(met) - min(met)))
            text = f"{ours}: {what} interval, largest difference in attainment (points; the paper: minimal)"
            worst = round(max(spreads), 2)
            reason = "the paper gives no number; 5 points count as its 'minimal'"
            setting = f"{name}, 4-task, {', '.join(label for label, _ in settings)}"
            kind = verdict(ours)
            claims.append(
                Claim("HyperFlexis", "Fig. 8", text, 5.0, worst, worst <= 5.0, setting, seeds, reason, verdict=kind)
            )
        progress(f"Fig. 8: {what} interval")
    for factor in times:  # it has neither interval and is shown for comparison
        p = measure(fleet(model), CONTENDERS[BY_CLASS], of_mix(tasks, at * factor, per_task), seeds)
        rows.append(["none", None, BY_CLASS, factor, p.attainment, p.e2e_s, p.cost])
    columns = ["interval of", "value", "scheduler", "load, x", "attainment", "mean latency, s", "cost, units"]
    return claims, [Table(f"Fig. 8: intervals; {name}, 4-task", columns, rows)], []


def table_2(
    progress: Progress, models: Sequence[str], factor: float, per_task: int, seeds: Sequence[int]
) -> tuple[list[Claim], list[Table], list[Plot]]:
    """The effect of the measured load times; the times themselves are inputs, not results."""
    rows: list[list[Value]] = []
    tasks = MIXES["4-task"]
    for name in models:
        model = MODELS[name]
        at = round_robin_knee(name, "4-task", per_task, tuple(seeds))
        for source, seconds in model.load_s.items():
            point = measure(
                fleet(model, elastic=growing(model, source)),
                CONTENDERS["slackline"],
                of_mix(tasks, at * factor, per_task),
                seeds,
            )
            rows.append([name, source, seconds, point.attainment, point.e2e_s, point.cost])
        for warm in (0, WARM):
            elastic = replace(growing(model), start_s=START_S, warm=warm)
            point = measure(
                fleet(model, elastic=elastic),
                CONTENDERS["slackline"],
                of_mix(tasks, at * factor, per_task),
                seeds,
                keep=True,
            )
            times = [took for result in point.results if (took := time_to_scale(result)) is not None]
            label = f"device, {warm} warm" if warm else f"device, the process too ({START_S:g} s)"
            rows.append(
                [name, label, statistics.median(times) if times else None, point.attainment, point.e2e_s, point.cost]
            )
        progress(f"Table 2: {name}")
    reason = (
        "load times by source are inputs of the simulator (the paper's own); weight loads are measured on real "
        "memory by `make bench-scaleout`. The table shows their effect on attainment, and the effect and cost "
        "of a warm pool (Fast Scaling: spare processes without weights)"
    )
    setting = f"slackline, 2 to 4 workers, 4-task at {factor:g} x round robin's 90 % point"
    load_s = MODELS["Llama70B"].load_s
    claims = []
    for source, what, theirs in (("disk", "disk", 19.39), ("host", "CPU offloading", 9.88)):
        ratio = round(load_s[source] / load_s["device"], 2)
        both = f"{load_s[source]:g} s / {load_s['device']:g} s"
        text = f"weight load from {what} over device to device (factor; the paper's Llama70B: {both})"
        claims.append(Claim("HyperFlexis", "Table 2", text, theirs, ratio, None, setting, seeds, reason, verdict=SET))
    columns = ["model", "weights from", "time to scale, s", "attainment", "mean latency, s", "cost, units"]
    return claims, [Table("Table 2: scaling with weights from each source", columns, rows)], []
