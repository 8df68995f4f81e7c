"""`make bench-fleets`: the default policy against every baseline in fleets unlike the demo's, in the simulator.

    make bench-fleets BENCH_ARGS="--cells slots_64 mixed --duration 10"

For each cell (benchmarks.fleets.cells) the knee of engine_priority_deadline is searched, and every policy runs at
multiples of it on the same requests. A table by cell and rate; last line: JSON with `by_fleet`, in which

- `attainment`: by policy, the mean over the seeds;
- `expired` and `refused`: by policy, requests of all seeds that ended without an answer, because their client gave up
  or because they were refused;
- `cost`: by policy, instance-seconds until the last request has ended, the mean over the seeds;
- `refused_wrongly`: requests that the default refused although an instance of the fleet could have kept their targets
  alone, by its true latency;
- `direction_changes_per_h`: how often the scalers of its stages went from out to in or back; with
  `most_direction_changes_per_h`, what its traffic explains. A cell's traffic begins once and ends once, so that is one
  change a stage and run.

`lead` is the default's attainment over the best baseline's where that attains 0.5 to 0.9, `worst` its smallest
difference to the best baseline over all cells, `expired` the number of its requests that expired in all cells, and
`cost_ratio` the mean of its cost over the best baseline's. `flapping` names the fleets and rates whose scalers changed
direction more often than that; with any of them the program ends with status 1.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections import Counter, defaultdict
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from itertools import pairwise
from typing import Any

from benchmarks.fleets.cells import DEFAULT, cells
from controller.core.types import LatencyCoefficients, Outcome
from controller.predict.latency import LatencyModel
from controller.simulator.experiment import Contender, ExperimentPlan, parse_experiment
from controller.simulator.report.results import RunResult, SimRecord
from controller.simulator.report.summary import attainment
from controller.simulator.runner import rates_of, run_once

CONTESTED = (0.5, 0.9)  # where the best baseline attains this much, policies can make a difference
SCALING = {"scale_out": 1, "scale_in": -1, "role_change": -1}  # its subject is the stage that gives the instance
BY_POLICY = ("attainment", "expired", "refused", "cost")
OF_DEFAULT = ("refused_wrongly", "direction_changes_per_h", "most_direction_changes_per_h")
TURNS = 1  # of a cell's traffic: it begins and it ends


def wrongly_refused(record: SimRecord, latencies: Sequence[LatencyCoefficients]) -> bool:
    """Could one of the instances have kept the targets of this refused request, with nothing else to do?"""
    if record.outcome is not Outcome.REFUSED:
        return False
    tokens, targets = record.prompt_tokens, record.targets
    for latency in latencies:
        model = LatencyModel(latency)
        prefill, step = model.prefill_sums(tokens, tokens * tokens), model.decode(1, tokens)
        if prefill <= targets.ttft_s and step <= targets.tpot_s:
            return True
    return False


def direction_changes(result: RunResult) -> int:
    """Counted for each stage by itself: prefill may need more while decode needs less."""
    stages: dict[str, list[int]] = defaultdict(list)
    for decision in result.decisions:
        if decision.kind in SCALING:
            stages[decision.subject].append(SCALING[decision.kind])
    return sum(one != other for signs in stages.values() for one, other in pairwise(signs))


def changes_allowed(plan: ExperimentPlan) -> int:
    """Changes of direction that the traffic of one run explains: each stage with a scaler may follow each turn once."""
    elastic = plan.settings.elastic
    return 0 if elastic is None else TURNS * (2 if elastic.decode else 1)


def run_policy(plan: ExperimentPlan, contender: Contender, rate: float | None) -> dict[str, Any]:
    """One policy at one rate, over all seeds."""
    latencies = sorted({instance.latency for instance in plan.settings.instances})
    results = [run_once(plan, contender, rate, seed) for seed in plan.seeds]
    hours = sum(result.ended_at for result in results) / 3600
    outcomes = Counter(record.outcome for result in results for record in result.records)
    return {
        "attainment": round(statistics.mean(attainment(result.records) for result in results), 4),
        "expired": outcomes[Outcome.EXPIRED],
        "refused": outcomes[Outcome.REFUSED],
        "refused_wrongly": sum(wrongly_refused(r, latencies) for result in results for r in result.records),
        "direction_changes_per_h": round(sum(map(direction_changes, results)) / hours, 1),
        "most_direction_changes_per_h": round(changes_allowed(plan) * len(results) / hours, 1),
        "cost": round(statistics.mean(result.cost for result in results), 1),
    }


def run_cell(name: str, duration_s: float | None) -> list[dict[str, Any]]:
    """An entry for each rate of the cell."""
    config = cells()[name]
    if duration_s is not None:
        config["workload"]["duration_s"] = duration_s
    plan = parse_experiment(config, _no_files, _no_files)
    fixed = replace(plan, settings=replace(plan.settings, elastic=None))  # the knee is that of the fleet as it begins
    entries = []
    rates, knee = rates_of(fixed)
    for rate in rates:
        by_policy = {each.label: run_policy(plan, each, rate) for each in plan.contenders}
        entries.append(
            {
                "fleet": name,
                "rate": None if rate is None else round(rate, 2),
                "times_knee": round(rate / knee, 2) if rate and knee else None,
                **{key: {label: found[key] for label, found in by_policy.items()} for key in BY_POLICY},
                **{key: by_policy[DEFAULT][key] for key in OF_DEFAULT},
            }
        )
    return entries


def _no_files(path: str) -> Any:
    raise ValueError(f"the matrix reads no files, but names {path}")


def best_baseline(entry: dict[str, Any]) -> tuple[str, float]:
    baselines = {label: value for label, value in entry["attainment"].items() if label != DEFAULT}
    label = max(baselines, key=lambda each: (baselines[each], each))
    return label, baselines[label]


def summary(entries: Sequence[dict[str, Any]]) -> dict[str, Any]:
    bests = [best_baseline(entry) for entry in entries]
    pairs = [(entry["attainment"][DEFAULT], best) for entry, (_, best) in zip(entries, bests, strict=True)]
    costs = [entry["cost"][DEFAULT] / entry["cost"][label] for entry, (label, _) in zip(entries, bests, strict=True)]
    contested = [ours / theirs for ours, theirs in pairs if CONTESTED[0] <= theirs <= CONTESTED[1]]
    return {
        "benchmark": "fleets",
        "lead": round(statistics.mean(contested), 4) if contested else None,
        "contested": len(contested),
        "worst": round(min(ours - theirs for ours, theirs in pairs), 4),
        "expired": sum(entry["expired"][DEFAULT] for entry in entries),
        "cost_ratio": round(statistics.mean(costs), 4),
        "refused_wrongly": sum(entry["refused_wrongly"] for entry in entries),
        "direction_changes_per_h": max(entry["direction_changes_per_h"] for entry in entries),
        "flapping": [named(entry) for entry in entries if flaps(entry)],
        "by_fleet": list(entries),
    }


def flaps(entry: dict[str, Any]) -> bool:
    """Whether scalers changed direction more often than the cell's traffic explains."""
    return bool(entry["direction_changes_per_h"] > entry["most_direction_changes_per_h"])


def named(entry: dict[str, Any]) -> str:
    return f"{entry['fleet']} at {entry['times_knee'] or 0:g} knees"


def heading() -> str:
    of_policy = f"{'expired':>8}{'cost':>9}"
    return (
        f"{'fleet':<25}{'x knee':>7}{DEFAULT:>11}{of_policy}  {'best baseline':<31}{of_policy}"
        f"{'wrongly refused':>17}{'changes/h':>10}{'at most':>8}"
    )


def row(entry: dict[str, Any]) -> str:
    """An entry of the table: the default and the best baseline side by side."""
    label, value = best_baseline(entry)
    ours, theirs = (f"{entry['expired'][each]:>8}{entry['cost'][each]:>9.1f}" for each in (DEFAULT, label))
    return (
        f"{entry['fleet']:<25}{entry['times_knee'] or 0:>7.2f}{entry['attainment'][DEFAULT]:>11.4f}{ours}"
        f"  {label + ' ' + format(value, '.4f'):<31}{theirs}"
        f"{entry['refused_wrongly']:>17}{entry['direction_changes_per_h']:>10.1f}"
        f"{entry['most_direction_changes_per_h']:>8.1f}"
    )


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cells", nargs="+", choices=sorted(cells()), default=sorted(cells()), metavar="CELL")
    parser.add_argument("--duration", type=float, help="seconds of traffic (default: as the cells say)")
    parser.add_argument("--workers", type=int, default=2, help="processes")
    args = parser.parse_args(arguments)
    print(heading())
    entries: list[dict[str, Any]] = []
    with ProcessPoolExecutor(args.workers) as pool:
        for of_cell in pool.map(run_cell, args.cells, [args.duration] * len(args.cells)):
            for entry in of_cell:
                print(row(entry))
                sys.stdout.flush()
            entries += of_cell
    found = summary(entries)
    print(json.dumps(found))
    return 1 if found["flapping"] else 0


if __name__ == "__main__":
    sys.exit(main())
