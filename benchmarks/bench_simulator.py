"""`make bench-simulator`: speed of the simulator, and how it grows with the number of requests.

Load: prompt and output lengths of the Azure 2023 conversation trace (a shipped sample, or the whole file with --trace),
Poisson arrivals at 80 % of the fleet's goodput rate (90 % attainment of TTFT 2 s, TPOT 100 ms; found by bisection
first, not timed), 8 instances of Llama-3.1-70B on 4 H100s each, continuous batching with chunked prefill, the default
policy set. A second case uses Kairos' choice of decodes in every step, which allows no leaps.

Each case runs in its own process, so that its peak memory is its own. Prints a table, then one line of JSON with
`seconds`, `cpu_seconds` and `peak_mb` by case. The limit is 60 s and 2 GB for 100,000 requests on one core. FULL=1 adds
1,000,000 requests; --count runs one case of that size.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from controller.simulator.__main__ import read_profile, read_trace
from controller.simulator.experiment import ExperimentPlan, parse_experiment
from controller.simulator.report.summary import attainment
from controller.simulator.runner import find_knee, run_once

ROOT = Path(__file__).resolve().parent.parent
SAMPLE = ROOT / "controller/simulator/samples/azure2023_conv_2000.csv"
PROFILE = ROOT / "workers/engine/profiles.json#llama-3.1-70b-h100-tp4"
INSTANCES = 8
LOAD = 0.8
KNEE_REQUESTS = 4000
BAR_REQUESTS, BAR_SECONDS, BAR_MB = 100_000, 60.0, 2048.0


@dataclass(frozen=True, slots=True)
class SimulatorCase:
    name: str
    requests: int
    batching: str = "chunked_prefill"


CASES = (
    SimulatorCase("10k", 10_000),
    SimulatorCase("100k", 100_000),
    SimulatorCase("100k kairos", 100_000, "kairos_decode"),
)
FULL_CASES = (*CASES, SimulatorCase("1m", 1_000_000))


def experiment(case: SimulatorCase, trace: Path) -> ExperimentPlan:
    raw = {
        "name": case.name,
        "instances": {
            "count": INSTANCES,
            "profile": str(PROFILE),
            "max_num_seqs": 256,
            "max_num_batched_tokens": 2048,
            "max_model_len": 8192,
            "prefix_caching": False,
            "batching": case.batching,
        },
        "workload": {
            "kind": "trace",
            "path": str(trace),
            "arrivals": "renewal",
            "count": case.requests,
            "ttft_s": 2.0,
            "tpot_s": 0.1,
        },
        "settings": {"progress_s": 1.0},
    }
    return parse_experiment(raw, read_profile, read_trace)


def measure(case: SimulatorCase, rate: float, trace: Path) -> dict[str, Any]:
    """One case in this process. `seconds` covers drawing the workload and the run."""
    ready = experiment(case, trace)
    wall, cpu = time.perf_counter(), time.process_time()
    result = run_once(ready, ready.contenders[0], rate, 1)
    seconds, cpu_seconds = time.perf_counter() - wall, time.process_time() - cpu
    if len(result.records) != case.requests:
        raise RuntimeError(f"{len(result.records)} of {case.requests} requests ended")
    return {
        "seconds": round(seconds, 2),
        "cpu_seconds": round(cpu_seconds, 2),
        "peak_mb": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024, 1),
        "virtual_s": round(result.ended_at, 1),
        "events": result.events,
        "steps": sum(use.steps for use in result.instances),
        "tokens": sum(use.generated_tokens for use in result.instances),
        "attainment": round(attainment(result.records), 4),
    }


def in_own_process(case: SimulatorCase, rate: float, trace: Path) -> dict[str, Any]:
    command = [sys.executable, "-m", "benchmarks.bench_simulator", "--count", str(case.requests), "--rate", str(rate)]
    command += ["--batching", case.batching, "--trace", str(trace)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"bench-simulator: {case.name} failed:\n{done.stderr}")
    return dict(json.loads(done.stdout.splitlines()[-1]))


def table(found: dict[str, dict[str, Any]]) -> str:
    lines = [f"{'case':16}{'seconds':>9}{'cpu s':>9}{'peak MB':>9}{'steps':>11}{'tokens':>13}{'attained':>10}"]
    for name, row in found.items():
        lines.append(
            f"{name:16}{row['seconds']:>9.1f}{row['cpu_seconds']:>9.1f}{row['peak_mb']:>9.0f}{row['steps']:>11,}"
            f"{row['tokens']:>13,}{row['attainment']:>10.3f}"
        )
    return "\n".join(lines)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.bench_simulator", description=__doc__.split("\n")[0])
    parser.add_argument("--trace", type=Path, default=SAMPLE, help="CSV with input_tokens and output_tokens")
    parser.add_argument("--count", type=int, help="one case of this many requests, in this process")
    parser.add_argument("--rate", type=float, help="requests/s (default: 80 %% of the goodput rate)")
    parser.add_argument("--batching", default="chunked_prefill")
    return parser.parse_args()


def main() -> int:
    arguments = parse()
    trace = arguments.trace.resolve()
    rate = arguments.rate
    if rate is None:
        small = experiment(SimulatorCase("knee", KNEE_REQUESTS), trace)
        knee = find_knee(small, small.contenders[0], 0.9)
        rate = LOAD * knee
        print(f"goodput {knee:.1f} requests/s; load {rate:.1f} requests/s", file=sys.stderr)
    if arguments.count:
        print(json.dumps(measure(SimulatorCase("only", arguments.count, arguments.batching), rate, trace)))
        return 0
    cases = FULL_CASES if os.environ.get("FULL", "") not in ("", "0") else CASES
    found = {case.name: in_own_process(case, rate, trace) for case in cases}
    print(table(found))
    keys = ("seconds", "cpu_seconds", "peak_mb")
    summary: dict[str, Any] = {key: {name: row[key] for name, row in found.items()} for key in keys}
    bars = [found[case.name] for case in cases if case.requests == BAR_REQUESTS]
    summary |= {
        "reached": all(bar["seconds"] <= BAR_SECONDS and bar["peak_mb"] <= BAR_MB for bar in bars),
        "rate": round(rate, 2),
        "instances": INSTANCES,
        "trace": trace.name,
        "cases": found,
    }
    print(json.dumps(summary))
    return 0


if __name__ == "__main__":
    sys.exit(main())
