"""`make bench-prune`: what pruning over the queues of all gateways changes, in the simulator.

A fleet (`--fleet`; `common`: the two instances of the fleet matrix, `mixed`: one of them twice as slow,
`disaggregated`: a prefill and a decode instance; `slow_link`: one and two, whose KV leaves at 0.5 GB/s by the policy
`mfs`; `slow_receiver`: two and one with the same ports; benchmarks.fleets.cells) under HyperFlexis' 4-task mix for
30 s, behind one, two and four gateways; `--long-prompts`: under the matrix's long prompts. Loads are multiples of the
knee of the default policy without pruning, or `--rates` in requests/s. `off`: the default policy; `on`: the same with
orders of the coordinator, 20 a second, 20 ms late; `scorpio`: SCORPIO's guards, which refuse what cannot be in time.
Every request counts, pruned ones too: one that is late is a miss.

Last line: JSON with `attainment` by gateways and load, means over the seeds; `by_class`, the same by SLO class, of the
requests of all seeds; `ratio`, `on` over `off`, and `worst`, the least of them; `pruned`, requests that were served
last for a time, and `pruned_made_it`, those of them that attained their targets. QUICK=1: one seed, 10 s, two gateways.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from benchmarks.fleets.cells import DEFAULT, LINKS, LONG_PROMPTS, SEEDS, cell, disaggregated, instances, slower
from controller.simulator.experiment import ExperimentPlan, parse_experiment
from controller.simulator.report.results import RunResult, SimRecord
from controller.simulator.report.summary import attainment
from controller.simulator.runner import find_knee, run_once
from controller.simulator.settings import PruningSettings

LOADS = (0.7, 1.0, 1.3, 1.7, 2.5)
GATEWAYS = (1, 2, 4)
QUICK_LOADS, QUICK_S = (1.0, 1.7), 10.0
BUDGET = 0.5
LEVEL = 0.9  # attainment at the knee
FLEETS: Mapping[str, tuple[Any, Mapping[str, Any]]] = {  # instances, and settings of the cell
    "common": (instances(), {}),
    "mixed": ([instances(1, profile=slower(2.0)), instances(1)], {}),
    "disaggregated": (disaggregated(1, 1), {"links": LINKS}),
    "slow_link": (disaggregated(1, 2), {"links": {**LINKS, "bandwidth_gb_s": 0.5, "flow_policy": "mfs"}}),
    "slow_receiver": (disaggregated(2, 1), {"links": {**LINKS, "bandwidth_gb_s": 0.5, "flow_policy": "mfs"}}),
}


def plan(
    gateways: int,
    duration_s: float,
    seeds: Sequence[int],
    budget: float | None,
    fleet: str = "common",
    long_prompts: bool = False,
) -> ExperimentPlan:
    served_by, settings = FLEETS[fleet]
    tasks = LONG_PROMPTS if long_prompts else "4-task"
    config: dict[str, Any] = cell(f"{gateways} gateways", served_by, tasks, gateways=gateways, **settings)
    config |= {"policies": [DEFAULT, "scorpio"], "seeds": list(seeds), "rates": [1.0]}
    del config["knee"]
    config["workload"]["duration_s"] = duration_s
    found = parse_experiment(config, lambda name: {}, lambda name: [])
    pruning = None if budget is None else PruningSettings(budget)
    return replace(found, settings=replace(found.settings, pruning=pruning))


def run(experiment: ExperimentPlan, policy: str, rate: float) -> list[RunResult]:
    (contender,) = (each for each in experiment.contenders if each.label == policy)
    return [run_once(experiment, contender, rate, seed) for seed in experiment.seeds]


def outcome(results: Sequence[RunResult]) -> float:
    return round(statistics.fmean(attainment(each.records) for each in results), 4)


def by_class(results: Sequence[RunResult]) -> dict[str, float]:
    """Attainment of each class, of the requests of all seeds."""
    found: defaultdict[str, list[SimRecord]] = defaultdict(list)
    for record in (record for each in results for record in each.records):
        found[record.slo_class].append(record)
    return {name: round(attainment(records), 4) for name, records in sorted(found.items())}


def pruned(results: Sequence[RunResult]) -> dict[str, int]:
    """Over all seeds."""
    records = [record for each in results for record in each.records if record.id in each.pruned]
    return {"pruned": len(records), "pruned_made_it": sum(record.attained for record in records)}


def measure(gateways: int, args: argparse.Namespace) -> Any:
    """Rows by load, or by rate."""
    off, on = (
        plan(gateways, args.duration, args.seeds, budget, args.fleet, args.long_prompts)
        for budget in (None, args.budget)
    )
    (default, _) = off.contenders
    if args.rates:
        rates = {f"{rate:g}/s": rate for rate in args.rates}
    else:
        knee = find_knee(replace(off, seeds=off.seeds[:1]), default, LEVEL)
        rates = {f"{load:g}": load * knee for load in args.loads}
    rows = {}
    for name, rate in rates.items():
        coordinated = run(on, DEFAULT, rate)
        results = {"off": run(off, DEFAULT, rate), "on": coordinated, "scorpio": run(off, "scorpio", rate)}
        attained = {mode: outcome(each) for mode, each in results.items()}
        classes = {mode: by_class(each) for mode, each in results.items()}
        rows[name] = {"attainment": attained, "by_class": classes, **pruned(coordinated), "rate": round(rate, 2)}
        print(f"{gateways} gateways, {name} ({rate:.1f}/s): {rows[name]}", flush=True)
    return rows


def ratios(rows: Mapping[str, Any]) -> dict[str, float]:
    found = {load: row["attainment"] for load, row in rows.items()}
    return {load: round(each["on"] / each["off"], 3) for load, each in found.items() if each["off"]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--budget", type=float, default=BUDGET, help="largest share of the waiting that is pruned")
    parser.add_argument("--gateways", type=int, nargs="+", default=GATEWAYS)
    parser.add_argument("--loads", type=float, nargs="+", default=LOADS)
    parser.add_argument("--rates", type=float, nargs="+", help="requests/s, in place of --loads")
    parser.add_argument("--long-prompts", action="store_true")
    parser.add_argument("--duration", type=float, default=30.0)
    parser.add_argument("--seeds", type=int, nargs="+", default=SEEDS)
    parser.add_argument("--fleet", choices=FLEETS, default="common")
    args = parser.parse_args()
    if os.environ.get("QUICK", "") not in ("", "0"):
        args.gateways, args.loads, args.duration, args.seeds = [2], QUICK_LOADS, QUICK_S, SEEDS[:1]
    found = {str(count): measure(count, args) for count in args.gateways}
    ratio = {count: ratios(rows) for count, rows in found.items()}
    report = {
        "fleet": args.fleet,
        "long_prompts": args.long_prompts,
        "budget": args.budget,
        "seeds": list(args.seeds),
        "by_class": {n: {load: row["by_class"] for load, row in rows.items()} for n, rows in found.items()},
        "attainment": {n: {load: row["attainment"] for load, row in rows.items()} for n, rows in found.items()},
        "pruned": {n: {load: row["pruned"] for load, row in rows.items()} for n, rows in found.items()},
        "pruned_made_it": {n: {load: row["pruned_made_it"] for load, row in rows.items()} for n, rows in found.items()},
        "ratio": ratio,
        "worst": min(each for rows in ratio.values() for each in rows.values()),
    }
    print(json.dumps(report))


if __name__ == "__main__":
    main()
