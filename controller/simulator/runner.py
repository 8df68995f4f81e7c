"""Runs experiments: one run, every policy at every rate, or a search for each policy's goodput rate."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from controller.core.errors import ConfigError
from controller.simulator.experiment import Contender, ExperimentPlan
from controller.simulator.report.results import RunResult
from controller.simulator.report.summary import report
from controller.simulator.report.trace_events import TraceWriter
from controller.simulator.simulation import Simulation
from controller.simulator.workloads.demand import Demand
from controller.simulator.workloads.program_workload import ProgramMix

Progress = Callable[[str, int, int], None]  # what, done, of
LOWEST_RATE, HIGHEST_RATE = 0.01, 100_000.0
FIRST_RATE = 8.0
ON_A_LINE = ("rate", "attainment", "attainment_spread", "goodput_tokens_per_s", "attained_per_s")


def silent(what: str, done: int, of: int) -> None:
    """Progress that is not shown."""


def run_once(
    experiment: ExperimentPlan,
    contender: Contender,
    rate: float | None,
    seed: int,
    progress: Progress = silent,
    trace: TraceWriter | None = None,
) -> RunResult:
    settings = contender.settings(experiment.settings)
    if settings.machine_speed is not None:
        settings = replace(settings, machine_speed=settings.machine_speed.drawn(seed))
    workload, programs, demands = experiment.workload, None, list[Demand]()
    if isinstance(workload, ProgramMix):
        believed = settings.instances[0].believed or settings.instances[0].latency
        programs = workload.programs(rate, seed, believed, contender.foresight)
    elif not (demands := workload.demands(rate, seed)):
        raise ConfigError("the workload has no requests in its duration", field="workload.duration_s")
    migrator = contender.build_migrator() if settings.disaggregated else None
    simulation = Simulation(settings, contender.build(), demands, programs=programs, migrator=migrator, trace=trace)
    at = f" at {rate:.3g}/s" if rate else ""
    return simulation.run(lambda done, of: progress(f"{contender.label}{at}, seed {seed}", done, of))


def find_knee(
    experiment: ExperimentPlan,
    contender: Contender,
    level: float,
    progress: Progress = silent,
    tolerance: float = 0.02,
    probed: list[dict[str, Any]] | None = None,
) -> float:
    """The highest rate (requests/s) at which the median attainment over the seeds is at least `level`.

    The first guess is doubled until the level is crossed, then bisected to `tolerance` (a share of the rate). The entry
    of each rate that was tried is added to `probed`, including that of the result.
    """

    def holds(rate: float) -> bool:
        entry = _entry(experiment, contender, rate, progress)
        if probed is not None:
            probed.append(entry)
        return float(entry["attainment"]) >= level

    low = high = FIRST_RATE
    if holds(low):
        while holds(high := low * 2):
            low = high
            if high > HIGHEST_RATE:
                raise ConfigError(f"{contender.label} holds {level} at any rate", field="workload")
    else:
        while not holds(low := high / 2):
            high = low
            if low < LOWEST_RATE:
                raise ConfigError(f"{contender.label} never reaches {level}", field="workload")
    while high / low > 1 + tolerance:
        middle = (low * high) ** 0.5
        low, high = (middle, high) if holds(middle) else (low, middle)
    return low


def rates_of(experiment: ExperimentPlan, progress: Progress = silent) -> tuple[list[float | None], float | None]:
    """The rates to run at, and the knee that they are multiples of, if any."""
    if experiment.rates:
        return list(experiment.rates), None
    if experiment.knee is None:
        return [None], None
    knee = find_knee(experiment, experiment.knee.contender, experiment.knee.level, progress)
    return [knee * times for times in experiment.knee.times], knee


def compare(experiment: ExperimentPlan, progress: Progress = silent) -> dict[str, Any]:
    """Every policy at every rate over every seed, on the same requests."""
    rates, knee = rates_of(experiment, progress)
    entries = [_entry(experiment, contender, rate, progress) for rate in rates for contender in experiment.contenders]
    return {"name": experiment.name, "seeds": list(experiment.seeds), "knee": knee, "entries": entries}


def _entry(experiment: ExperimentPlan, contender: Contender, rate: float | None, progress: Progress) -> dict[str, Any]:
    reports = [
        report(run_once(experiment, contender, rate, seed, progress), experiment.warmup_s) for seed in experiment.seeds
    ]
    return {"policy": contender.label, "policy_set": contender.policy_set, "rate": rate, **summary(reports)}


def summary(reports: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Medians over seeds, the lowest and highest attainment, and the first seed's whole report for charts."""
    seen = [each["attainment"] for each in reports]
    classes = sorted({name for each in reports for name in each["by_class"]})
    return {
        "attainment": statistics.median(seen),
        "attainment_spread": [min(seen), max(seen)],
        "by_class": {name: _median(reports, "by_class", name, "attainment") for name in classes},
        "ttft_p50_s": _median(reports, "ttft_s", "p50"),
        "ttft_p95_s": _median(reports, "ttft_s", "p95"),
        "tpot_p50_s": _median(reports, "tpot_s", "p50"),
        "e2e_mean_s": _median(reports, "e2e_mean_s"),
        "goodput_tokens_per_s": _median(reports, "goodput_tokens_per_s"),
        "attained_per_s": _median(reports, "attained_per_s"),
        "utilisation": _median(reports, "utilisation"),
        "cost": _median(reports, "cost"),
        "outcomes": [each["outcomes"] for each in reports],
        "first_seed": reports[0],
    }


def _median(reports: Sequence[Mapping[str, Any]], *path: str) -> float | None:
    found = []
    for each in reports:
        value: Any = each
        for key in path:
            value = value.get(key) if isinstance(value, Mapping) else None
        if value is not None:
            found.append(float(value))
    return statistics.median(found) if found else None


def goodput(experiment: ExperimentPlan, progress: Progress = silent) -> dict[str, Any]:
    """FlowPrefill's goodput: the highest rate at `level` attainment, by policy.

    `lines`: by policy, the result at each rate that was tried. `entries`: each policy's whole entry at its goodput.
    """
    rates: dict[str, float] = {}
    lines: dict[str, list[dict[str, Any]]] = {}
    entries = []
    for each in experiment.contenders:
        probed: list[dict[str, Any]] = []
        rates[each.label] = find_knee(experiment, each, experiment.level, progress, probed=probed)
        by_rate = {entry["rate"]: entry for entry in probed}
        lines[each.label] = [{name: by_rate[rate][name] for name in ON_A_LINE} for rate in sorted(by_rate)]
        entries.append(by_rate[rates[each.label]])
    whole = {"name": experiment.name, "level": experiment.level, "seeds": list(experiment.seeds)}
    return {**whole, "goodput": rates, "lines": lines, "entries": entries}
