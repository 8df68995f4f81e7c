"""`make bench-vllm`: Slackline against round robin, least outstanding, EDF and vLLM's own priorities on real vLLM.

Two real vLLM servers, one core each, prefix caching off, prompts as random token ids with fresh seeds. Each run starts
a new gateway process with one policy set, over the same PostgreSQL, Redis, classes and instances, so that only the
policy differs. Two contenders use no Slackline: the client alternates between the engines, with and without vLLM's
priorities, while no process of ours runs. Contenders alternate, in a different order for each seed. The client names
its class and its targets (no waiting time). No request tells the length of its answer (`load/lengths.py`).
Fixed windows are swept once per load, on the first seed, outward from the usual one until neither neighbour of the best
is better; the best one is used for the other seeds.

QUICK=1: one seed, two loads, six contenders where none are named, no sweep, no repeats (`largest_gap_s` shows a
disturbed run), the knee from the last full run if the profile of that run still holds, else searched with
QUICK_KNEE_S seconds of arrivals. The loads that it chooses itself fit into 15 minutes. It does not change the
results of full runs.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from benchmarks.load.generator import CUTOFF_S
from benchmarks.load.journal import RunJournal
from benchmarks.load.knee import LEVEL, find_knee
from benchmarks.load.scoring import Score, summary
from benchmarks.load.trials import TRIES, Bench, note
from benchmarks.load.workloads import MIXES, burst
from benchmarks.machine.names import machine_name
from benchmarks.servers.engines import prefer, stop_on_sigterm, vllm_missing
from benchmarks.vllm.pair import CLIENT_ABOVE, vllm_pair
from benchmarks.vllm.plan import (
    BASELINES,
    CONTENDERS,
    DIRECT,
    LOADS,
    QUICK_CONTENDERS,
    QUICK_LOADS,
    USUAL_WINDOWS,
    PlannedLoad,
    VllmContender,
)
from benchmarks.vllm.profiled import estimated_knee

# Under version control, one folder per machine: a full measurement takes hours and may be done in several sessions.
RESULTS = Path(__file__).resolve().parents[1] / "docs" / "measurements" / "vllm" / machine_name()
KNEES = RESULTS / "knees.json"
PROFILE = RESULTS / "profile.json"
KNEE_SEED = 900
KNEE_PER_TASK, QUICK_KNEE_S = 300, 40.0  # 300 are the paper's; QUICK: arrivals of so many seconds
FIRST_SEED = 1000
STEP, QUICK_STEP = 1.15, 1.3  # between the rates of the search
QUICK_BUDGET_S = 14.5 * 60
QUICK_RUN_OVERHEAD_S = 6.0  # to start a gateway and wait for idle engines
QUICK_DRAIN_S = 18.0  # length of a burst's run, averaged over the policies
SHORTEST_SUSTAINED_S = 25.0


class VllmComparison:
    """All loads on one pair of servers."""

    def __init__(
        self,
        bench: Bench,
        seeds: range,
        sweep: bool,
        journal: RunJournal | None = None,
        contenders: Sequence[VllmContender] = CONTENDERS,
    ) -> None:
        self.bench = bench
        self.journal = journal if journal is not None else RunJournal(None)
        self.seeds = seeds
        self.sweep = sweep
        self.contenders = contenders

    def load(self, load: PlannedLoad, rate: float) -> dict[str, Any]:
        """One entry of `by_load`."""
        note(f"{load.name}: {rate:.1f} requests/s")
        scores: dict[str, list[Score]] = {contender.name: [] for contender in self.contenders}
        windows: dict[str, int] = {}
        swept: dict[str, dict[str, float]] = {}
        for turn in self.seeds:
            plan, run = self._arrivals(load, rate, turn)
            first = turn % len(self.contenders)
            for contender in (*self.contenders[first:], *self.contenders[:first]):
                if contender.windows and contender.name not in windows:
                    found = self._sweep(contender, load, plan, run)
                    windows[contender.name] = max(found, key=lambda window: found[window].attainment)
                    swept[contender.name] = {str(w): round(s.attainment, 4) for w, s in found.items()}
                    scores[contender.name].append(found[windows[contender.name]])
                else:
                    scores[contender.name].append(self._run(contender, load, plan, windows.get(contender.name), run))
        entry: dict[str, Any] = {"mix": load.mix, "kind": load.kind, "rate": round(rate, 2), "times_knee": load.times}
        entry |= {"duration_s": load.duration_s} if load.kind == "sustained" else {"per_task": load.per_task}
        entry |= {name: summary(of) for name, of in scores.items()}
        entry |= {"windows": windows, "sweep": swept}
        return entry

    def _arrivals(self, load: PlannedLoad, rate: float, turn: int) -> tuple[Sequence[Any], dict[str, Any]]:
        """The requests of a load with one of its seeds, and the name of its runs in the journal."""
        seed = FIRST_SEED + 37 * turn + round(1000 * load.times)
        run = {**asdict(load), "rate": round(rate, 4), "seed": seed, "lengths": "hidden"}
        return load.arrivals(rate, seed), run

    def _sweep(
        self, contender: VllmContender, load: PlannedLoad, plan: Sequence[Any], run: Mapping[str, Any]
    ) -> dict[int, Score]:
        usual = USUAL_WINDOWS[contender.name, load.kind]
        return climb(
            contender.windows if self.sweep else [usual],
            usual,
            lambda window: self._run(contender, load, plan, window, run),
        )

    def _run(
        self,
        contender: VllmContender,
        load: PlannedLoad,
        plan: Sequence[Any],
        window: int | None,
        run: Mapping[str, Any],
    ) -> Score:
        policy, overrides = contender.policy_set, contender.overrides(window)

        def measure() -> Score:
            if contender.direct:
                return self.bench.direct(DIRECT[contender.name] == "class", plan, load.tasks)
            return self.bench.through_gateway(policy, overrides, plan, load.tasks)

        found = self.journal.once({**run, "policy": policy, "overrides": overrides}, measure)
        classes = " ".join(f"{share:.2f}" for share in found.by_class.values())
        shown = contender.name + (f"({window})" if window is not None else "")
        note(
            f"    {shown:28} {found.attainment:.3f}  [{classes}]  E2E {found.e2e_mean_s:.1f} s  {dict(found.outcomes)}"
        )
        return found


def climb(values: Sequence[int], start: int, measure: Callable[[int], Score]) -> dict[int, Score]:
    """The measurements of ascending `values`, from `start` towards the best until neither of its neighbours is
    better.
    """
    found = {start: measure(start)}
    while True:
        at = values.index(max(found, key=lambda value: found[value].attainment))
        neighbours = [value for value in values[max(0, at - 1) : at + 2] if value not in found]
        if not neighbours:
            return found
        found |= {value: measure(value) for value in neighbours}


def search_knee(bench: Bench, mix: str, quick: bool) -> float:
    """The knee of round robin without Slackline on a mix; the search starts from the profile's estimate."""

    def attainment(rate: float) -> float:
        per_task = math.ceil(QUICK_KNEE_S * rate / len(MIXES[mix])) if quick else KNEE_PER_TASK
        found = bench.direct(False, burst(MIXES[mix], rate, KNEE_SEED, per_task), MIXES[mix])
        note(f"    direct round robin at {rate:.1f} requests/s: {found.attainment:.3f}")
        return found.attainment

    note(f"knee of direct round robin on the {mix} mix")
    factor = QUICK_STEP if quick else STEP
    knee, _ = find_knee(attainment, estimated_knee(bench.stack.fleet, MIXES[mix]), factor)
    return knee


def known_knees() -> dict[str, float]:
    try:
        return dict(json.loads(KNEES.read_text()))
    except (FileNotFoundError, json.JSONDecodeError):
        return {}


def knees(
    bench: Bench, mixes: Sequence[str], quick: bool, given: Mapping[str, float], stored: bool = False
) -> dict[str, dict[str, Any]]:
    """By mix: the rate, and where it comes from. `stored`: whether those on file hold for this run."""
    found: dict[str, dict[str, Any]] = {}
    for mix in mixes:
        if mix in given:
            found[mix] = {"rate": given[mix], "from": "--knee"}
        elif stored and mix in known_knees():
            found[mix] = {"rate": known_knees()[mix], "from": "the last full run on this machine"}
        elif quick:
            found[mix] = {"rate": search_knee(bench, mix, quick), "from": f"measured for {QUICK_KNEE_S:.0f} s a rate"}
        else:
            found[mix] = {"rate": search_knee(bench, mix, quick), "from": "measured"}
            KNEES.parent.mkdir(parents=True, exist_ok=True)
            KNEES.write_text(json.dumps({**known_knees(), mix: found[mix]["rate"]}) + "\n")
    return found


def fit_to_budget(loads: Sequence[PlannedLoad], rates: Mapping[str, float], spent_s: float) -> list[PlannedLoad]:
    """Fit QUICK's loads into 15 minutes.

    The sustained load gets the time that is left (at most its 90 s). If not even SHORTEST_SUSTAINED_S fits (a slow
    machine has a low knee, so its bursts last long), bursts are shortened.
    """
    each_s = (QUICK_BUDGET_S - spent_s) / len(QUICK_CONTENDERS) - QUICK_RUN_OVERHEAD_S * len(loads)
    bursts = [load for load in loads if load.kind == "burst"]
    drains_s = QUICK_DRAIN_S * len(bursts) + CUTOFF_S * (len(loads) - len(bursts))
    arriving_s = sum(load.per_task * len(load.tasks) / (rates[load.mix] * load.times) for load in bursts)
    lasting = each_s - drains_s - arriving_s
    share = min(1.0, max(0.1, (each_s - drains_s - SHORTEST_SUSTAINED_S) / arriving_s))
    seconds = round(max(SHORTEST_SUSTAINED_S, min(90.0, lasting)))
    return [
        replace(load, duration_s=seconds)
        if load.kind == "sustained"
        else replace(load, per_task=int(load.per_task * share))
        for load in loads
    ]


def table(entries: Sequence[Mapping[str, Any]]) -> str:
    lines = [f"{'load':34}{'policy':28}{'attainment':>11}{'spread':>15}{'mean E2E':>10}{'our cores':>11}  by class"]
    for entry in entries:
        load = f"{entry['mix']} {entry['kind']} {entry['times_knee']:g}x = {entry['rate']:.1f}/s"
        for name in [contender.name for contender in CONTENDERS if contender.name in entry]:
            row = entry[name]
            low, high = row["attainment_spread"]
            classes = " ".join(f"{task} {share:.2f}" for task, share in row["by_class"].items())
            window = f" ({entry['windows'][name]})" if name in entry["windows"] else ""
            lines.append(
                f"{load:34}{name + window:28}{row['attainment']:>11.3f}{f'{low:.3f}-{high:.3f}':>15}"
                f"{row['e2e_mean_s']:>9.1f}s{sum(row['cpu_share'].values()):>11.2f}  {classes}"
            )
            load = ""
        best = max(entry[name]["attainment"] for name in BASELINES if name in entry)
        ours, robin = entry["slackline"]["attainment"], entry["direct_round_robin"]["attainment"]
        ratio = f"{ours / robin:.2f}x round robin without it" if robin else "round robin without it met nothing"
        lines.append(f"{'':34}slackline is {ours / best if best else 0:.2f}x the best baseline, {ratio}")
    return "\n".join(lines)


def parse(quick: bool) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.bench_vllm", description="Policies on real vLLM.")
    parser.add_argument("--seeds", type=int, help="how many (3; QUICK=1: 1)")
    parser.add_argument(
        "--from-seed", type=int, default=1, help="first seed to run; earlier ones come from another machine"
    )
    parser.add_argument("--loads", default="", help=f"only these, comma-separated: {', '.join(x.name for x in LOADS)}")
    parser.add_argument(
        "--contenders", default="", help="only these, comma-separated (with slackline, direct_round_robin)"
    )
    parser.add_argument(
        "--knee", action="append", default=[], metavar="MIX=RATE", help="use this knee instead of searching for it"
    )
    parser.add_argument("--per-task", type=int, help="requests per task in a burst (300; QUICK=1: as time is left)")
    parser.add_argument("--duration", type=float, help="seconds of a sustained load (90; QUICK=1: as time is left)")
    parser.add_argument("--no-sweep", action="store_true", help="use the usual best windows")
    parser.add_argument("--resume", action="store_true", help="continue an earlier run")
    parser.add_argument(
        "--output", type=Path, help="report, rewritten after every load (default: beside the other results)"
    )
    arguments = parser.parse_args()
    arguments.seeds = arguments.seeds or (1 if quick else 3)
    if not 1 <= arguments.from_seed <= arguments.seeds:
        parser.error(f"--from-seed: between 1 and --seeds, {arguments.seeds}")
    names = [name.strip() for name in arguments.loads.split(",") if name.strip()]
    known = {load.name: load for load in LOADS}
    unknown = sorted(set(names) - set(known))
    if unknown:
        parser.error(f"--loads: unknown {unknown[0]!r}")
    wanted = [known[name] for name in names] if names else QUICK_LOADS if quick else LOADS
    changed = {"per_task": arguments.per_task, "duration_s": arguments.duration}
    changed = {name: value for name, value in changed.items() if value is not None}
    arguments.loads = [replace(load, **changed) for load in wanted]
    arguments.fit = quick and not names and not changed  # the loads, to the time of QUICK
    arguments.contenders = _contenders(parser, arguments.contenders, QUICK_CONTENDERS if quick else CONTENDERS)
    arguments.knee = {mix: float(rate) for mix, rate in (text.split("=", 1) for text in arguments.knee)}
    return arguments


def _contenders(
    parser: argparse.ArgumentParser, text: str, unnamed: Sequence[VllmContender]
) -> Sequence[VllmContender]:
    names = {name.strip() for name in text.split(",") if name.strip()}
    unknown = sorted(names - {contender.name for contender in CONTENDERS})
    if unknown:
        parser.error(f"--contenders: unknown {unknown[0]!r}")
    if names and not {"slackline", "direct_round_robin"} <= names:
        parser.error("--contenders: slackline and direct_round_robin are needed to compare")
    return [contender for contender in CONTENDERS if contender.name in names] if names else unnamed


def measure(
    bench: Bench, arguments: argparse.Namespace, quick: bool, started: float, as_stored: bool
) -> dict[str, Any]:
    """`as_stored`: as in `Profiled`."""
    loads: list[PlannedLoad] = arguments.loads
    stored = arguments.resume or (quick and as_stored)
    found = knees(bench, sorted({load.mix for load in loads}, reverse=True), quick, arguments.knee, stored)
    rates = {mix: knee["rate"] for mix, knee in found.items()}
    if arguments.fit:
        loads = fit_to_budget(loads, rates, time.monotonic() - started)
    journal = RunJournal(None if quick else RESULTS / "runs.jsonl", arguments.resume)
    seeds = range(arguments.from_seed - 1, arguments.seeds)
    experiment = VllmComparison(bench, seeds, not (quick or arguments.no_sweep), journal, arguments.contenders)
    report: dict[str, Any] = {
        "by_load": [],
        "knee": {mix: {**knee, "rate": round(knee["rate"], 2), "level": LEVEL} for mix, knee in found.items()},
        "seeds": len(seeds),
        "quick": quick,
        "output_length": "hidden: max_tokens is one cap for all, and an answer ends by min_tokens and a stop token",
        "waiting_time": "Slackline's default: requests name a class, a TTFT and a TPOT target",
        "profile": bench.stack.fleet.coefficients,
    }
    for load in loads:
        report["by_load"].append(experiment.load(load, rates[load.mix] * load.times))
        report |= {"dropped_runs": bench.dropped, "seconds": round(time.monotonic() - started)}
        output = arguments.output or RESULTS / ("quick.json" if quick else "report.json")
        output.parent.mkdir(parents=True, exist_ok=True)
        output.write_text(json.dumps(report, indent=1) + "\n")
    return report


def main() -> int:
    quick = os.environ.get("QUICK", "") not in ("", "0")
    arguments = parse(quick)
    started = time.monotonic()
    if (missing := vllm_missing()) is not None:
        print(f"bench-vllm: {missing}", file=sys.stderr)
        return 1
    stop_on_sigterm()
    prefer(os.getpid(), above=CLIENT_ABOVE)
    tasks = [task for mix in MIXES.values() for task in mix]
    try:
        with vllm_pair(tasks, PROFILE, quick, None, arguments.resume) as (stack, profiled):
            bench = Bench(stack, tries=1 if quick else TRIES, own_targets=True, lengths_hidden=True)
            report = measure(bench, arguments, quick, started, profiled.as_stored)
    except RuntimeError as error:  # servers or a gateway that do not start, or no knee; finished loads are stored
        print(f"bench-vllm: {error}", file=sys.stderr)
        return 1
    print(table(report["by_load"]))
    print(json.dumps(report))
    return 0


if __name__ == "__main__":
    sys.exit(main())
