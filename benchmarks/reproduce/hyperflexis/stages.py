"""HyperFlexis Fig. 4: disaggregated prefill and decode, 2 + 2 instances, and scaled out to 8."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import NamedTuple

from benchmarks.reproduce.claims import Claim, Plot, Progress, Table, Value
from benchmarks.reproduce.hyperflexis import causes
from benchmarks.reproduce.hyperflexis.setting import (
    CONTENDERS,
    MODELS,
    OURS,
    HyperFlexisModel,
    Point,
    instance,
    knee,
    measure,
    of_mix,
)
from benchmarks.reproduce.hyperflexis.stronger import Compared, attains, verdict
from benchmarks.reproduce.hyperflexis.thresholds import CANDIDATES, Swept, Thresholds, sweep
from controller.scale import ScalingConfig
from controller.simulator import ElasticSettings, SimulationSettings
from controller.simulator.network import LinkSettings
from controller.simulator.workloads.mixes import MIXES

TIMES = (1.0, 1.5, 2.0, 3.0, 4.0)
SWEPT = (1.0, 3.0)  # of TIMES, for the scaler's thresholds
DEFAULT: Thresholds = CANDIDATES[0]
MOST = 8
ROUND_ROBIN, BY_CLASS = "round robin", "engine priority by class"
SLIGHTLY = {
    "Qwen7B": (1.10, "slightly higher"),
    "Qwen32B": (1.05, "roughly equivalent"),
}  # our reading of its words
SCALING = "{}, scaling"
GAIN, FASTER = 2.54, 31.82  # attainment over round robin, and per cent of its mean latency saved
COLUMNS = [
    "model", "load, x", "scheduler", "attainment", "± std", "TTFT kept", "TPOT kept", "mean latency, s",
    "cost, units", "instances", "role changes", "busy share", "least busy decode instance",
]  # fmt: skip


def stages(
    model: HyperFlexisModel, *, scaling: bool = False, thresholds: Thresholds = DEFAULT, **settings: object
) -> SimulationSettings:
    """2 prefill and 2 decode instances; scaled, each stage has at least one and both together at most eight."""
    instances = tuple(instance(model, role=role) for role in ("prefill", "prefill", "decode", "decode"))
    made = SimulationSettings(instances, links=LinkSettings())
    if scaling:
        common = ScalingConfig(
            "model",
            "prefill",
            min_instances=1,
            max_instances=MOST - 1,
            cooldown_s=1.0,
            **thresholds,
        )
        decode = replace(common, role="decode")
        made = replace(made, elastic=ElasticSettings(common, "device", dict(model.load_s), decode, MOST))
    return replace(made, **settings)  # type: ignore[arg-type]


class Run(NamedTuple):
    """One scheduler at `factor` times the rate at which round robin (`base`) attains 90 %."""

    model: str
    factor: float
    label: str
    point: Point
    base: Point

    @property
    def where(self) -> str:
        return f"{self.model}, {self.factor:g} x the 90 % point"

    @property
    def times(self) -> float:
        """Attainment over round robin's."""
        return self.point.attainment / max(self.base.attainment, 1e-9)

    @property
    def faster(self) -> float:
        """Per cent of round robin's mean latency saved."""
        return 100 * (1 - self.point.e2e_s / self.base.e2e_s)

    @property
    def dearer(self) -> float:
        """Cost over round robin's."""
        return self.point.cost / self.base.cost

    @property
    def kept(self) -> list[float]:
        """Shares of the requests that keep their TTFT and their TPOT; empty runs have none."""
        records = [record for result in self.point.results for record in result.records]
        if not records:
            return [0.0, 0.0]
        return [statistics.fmean(getattr(record, name) for record in records) for name in ("ttft_met", "tpot_met")]

    @property
    def over_round_robin(self) -> causes.ComparedPair:
        return causes.ComparedPair(self.label, self.point, ROUND_ROBIN, self.base)

    @property
    def row(self) -> list[Value]:
        point, kept = self.point, self.kept
        changes = sum(d.kind == "role_change" for result in point.results for d in result.decisions)
        most = max((s.instances for result in point.results for s in result.samples), default=4)
        return [
            self.model, self.factor, self.label, point.attainment, point.spread, *kept, point.e2e_s, point.cost, most,
            changes, point.work.busy, _least_busy(point),
        ]  # fmt: skip


def _least_busy(point: Point) -> float:
    """Of the decode instances of all runs that were there for at least half of their run; 0 without any."""
    shares = [
        use.busy_s / use.provisioned_s
        for result in point.results
        for use in result.instances
        if use.role == "decode" and use.provisioned_s >= result.ended_at / 2
    ]
    return min(shares, default=0.0)


def figure_4(
    progress: Progress, models: Sequence[str], times: Sequence[float], per_task: int, seeds: Sequence[int]
) -> tuple[list[Claim], list[Table], list[Plot]]:
    knees = {
        name: knee(stages(MODELS[name]), CONTENDERS[ROUND_ROBIN], MIXES["4-task"], per_task, seeds) for name in models
    }
    taken, sweeps = thresholds_of(knees, per_task)
    progress("; ".join(table.title for table in sweeps))
    runs: list[Run] = []
    plots: list[Plot] = []
    for name, at in knees.items():
        own = [run for factor in times for run in _runs(name, at, factor, per_task, seeds, taken)]
        runs += own
        plots.append(_plot(name, at, own))
        progress(f"Fig. 4: {name}, round robin holds 90 % up to {at:.1f} requests/s")
    setting = f"; 2P + 2D (to 8 with scaling), 4-task, {per_task} a task"
    table = Table("Fig. 4: prefill/decode disaggregation", COLUMNS, [run.row for run in runs])
    return claims(runs, setting, seeds), [*sweeps, table], plots


def thresholds_of(knees: Mapping[str, float], per_task: int) -> tuple[dict[str, Thresholds], list[Table]]:
    """The scaler's thresholds of each of ours, at the best of their sweep over models and loads."""
    loads = [
        Swept(
            f"{name}, {factor:g} x",
            partial(_growing, name),
            stages(MODELS[name]),
            of_mix(MIXES["4-task"], at * factor, per_task),
        )
        for name, at in knees.items()
        for factor in SWEPT
    ]
    found = {label: sweep(label, loads, "Fig. 4: scaler's thresholds") for label in OURS}
    return {label: taken for label, (taken, _) in found.items()}, [table for _, table in found.values()]


def _growing(name: str, thresholds: Thresholds) -> SimulationSettings:
    return stages(MODELS[name], scaling=True, thresholds=thresholds)


def _runs(
    name: str, at: float, factor: float, per_task: int, seeds: Sequence[int], taken: Mapping[str, Thresholds]
) -> list[Run]:
    """Round robin, the engines' own priority by class and ours on fixed stages, then ours on stages that scale."""
    fixed = stages(MODELS[name])
    requests = of_mix(MIXES["4-task"], at * factor, per_task)
    points = {
        label: measure(fixed, CONTENDERS[label], requests, seeds, keep=True) for label in (ROUND_ROBIN, BY_CLASS, *OURS)
    }
    for label in OURS:
        elastic = stages(MODELS[name], scaling=True, thresholds=taken[label])
        points[SCALING.format(label)] = measure(elastic, CONTENDERS[label], requests, seeds, keep=True)
    return [Run(name, factor, label, point, points[ROUND_ROBIN]) for label, point in points.items()]


def _plot(name: str, at: float, runs: Sequence[Run]) -> Plot:
    series: dict[str, list[tuple[float, float]]] = {}
    for run in runs:
        series.setdefault(run.label, []).append((run.factor, run.point.attainment))
    return Plot(
        f"hyperflexis-fig4-{name}".lower(),
        f"HyperFlexis Fig. 4: {name}, 4-task, disaggregated",
        f"load, multiples of {at:.1f} requests/s",
        "SLO attainment",
        series,
        0.9,
    )


def claims(runs: Sequence[Run], setting: str, seeds: Sequence[int]) -> list[Claim]:
    """The best load of each scheduler."""
    labels = [label for label in dict.fromkeys(run.label for run in runs) if label not in (ROUND_ROBIN, BY_CLASS)]
    made = []
    for label in labels:
        best = max((run for run in runs if run.label == label), key=lambda run: run.times)
        ratio, where = best.times, best.where
        text = f"{label}: disaggregated attainment over round robin (factor)"
        why = "" if ratio >= GAIN else causes.attainment(best.over_round_robin, GAIN) + _today(best, runs)
        made.append(
            Claim(
                "HyperFlexis", "Fig. 4", text, GAIN, round(ratio, 3), ratio >= GAIN, where + setting, seeds, why,
                verdict=verdict(label),
            )
        )  # fmt: skip
    for label in labels:
        best = max((run for run in runs if run.label == label), key=lambda run: run.faster)
        percent, where = best.faster, best.where
        text = f"{label}: disaggregated mean latency below round robin (%)"
        why = ""
        if percent < FASTER:
            others = [run.point for run in runs if run.where == best.where and _scales(run) == _scales(best)]
            why = causes.latency(best.over_round_robin, (1 - FASTER / 100) * best.base.e2e_s, others)
            why += _today(best, runs)
        made.append(
            Claim(
                "HyperFlexis", "Fig. 4", text, FASTER, round(percent, 2), percent >= FASTER, where + setting, seeds,
                why, verdict=verdict(label),
            )
        )  # fmt: skip
    return made + _cost_claims(runs, setting, seeds) + _today_claims(runs, labels, setting, seeds)


def _today(run: Run, runs: Sequence[Run]) -> str:
    """How today's engines did at this load."""
    found = [each.point for each in runs if each.where == run.where and each.label == BY_CLASS]
    return "".join(f". {BY_CLASS} attains {point.attainment:.3f} in {point.e2e_s:.2f} s" for point in found)


def _scales(run: Run) -> bool:
    return run.label not in CONTENDERS


def _cost_claims(runs: Sequence[Run], setting: str, seeds: Sequence[int]) -> list[Claim]:
    """With scaling: cost over round robin's, at the load where it is highest."""
    claims = []
    for name, (most, words) in SLIGHTLY.items():
        for ours in OURS:
            label = SCALING.format(ours)
            found = [(run.dearer, run.where) for run in runs if (run.label, run.model) == (label, name)]
            if not found:
                continue
            (ratio, where), (least, _) = max(found), min(found)
            of = "disaggregated cost over round robin's"
            text = f"{label}: {of}, {name}, highest over the loads (factor; the paper: {words})"
            at = next(run for run in runs if (run.label, run.model, run.where) == (label, name, where))
            reason = (
                f"{most:g} is our reading of its words; least over loads {least:.2f}. There the fleet attains "
                f"{at.point.attainment:.3f} (round robin {at.base.attainment:.3f}) with {abs(at.faster):.0f} % "
                f"{'less' if at.faster >= 0 else 'more'} mean latency"
            )
            if ratio > most:
                reason += f"; {causes.cost(at.over_round_robin, most * at.base.cost)}"
            claims.append(
                Claim(
                    "HyperFlexis", "Fig. 4", text, most, round(ratio, 3), ratio <= most, where + setting, seeds, reason,
                    verdict=verdict(label),
                )
            )  # fmt: skip
    return claims


def _today_claims(runs: Sequence[Run], labels: Sequence[str], setting: str, seeds: Sequence[int]) -> list[Claim]:
    """On equal fleets, against the engine's own priority by class, which the paper does not have."""
    today = {(run.model, run.factor): run.point for run in runs if run.label == BY_CLASS}
    return [
        attains(
            "Fig. 4", f"{label}, disaggregated", BY_CLASS,
            [Compared(run.where, run.point, today[run.model, run.factor]) for run in runs if run.label == label],
            setting.removeprefix("; "), seeds,
        )
        for label in labels
        if label in OURS
    ]  # fmt: skip
