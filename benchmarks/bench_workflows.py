"""`make bench-workflows`: workflows on two real vLLM servers, with Slackline, its plug-in, and without it.

Latency, deadline and compound requests 1:1:1 (`benchmarks.workflows.plan`). A compound request's later calls are sent
when their parents have answered. Targets are the 95 % points of a light run, as in the paper: TTFT and TBT of latency
requests, end to end of the others' calls, which is a deadline request's deadline and, times the number of stages, a
compound request's. The knee is where round robin first drops below 0.9 on the
compared plans.

`round_robin` and `engine_priority_*`: the client alternates between the servers and sends vLLM's own priority, by
class, by when a call is due, or by when its whole workflow is due; nothing of Slackline runs. `slackline`,
`slackline_plugin` (servers with our scheduler) and `slackline_no_analyser` are gateways, each a new process that begins
with what an earlier one learned; the analyser's forest and graphs were trained on the records of that earlier run, of
another seed. No request tells its length. `gateway_round_robin`, only if named: the same gateway with the policy
`round_robin`, by which what the path takes of the servers' cores is told from what is decided.

By load and contender, medians over seeds: `workflow_attainment` (share of all workflows in time; a compound request
counts once, all or nothing), `by_type`, `goodput_tokens_per_s`, `goodput_requests_per_s` (a second of arrivals).
`over_best`: of our contenders, times round robin's and the best priority's attainment. Goals: 1.5 and 1.1 from 1.3
knees, nowhere below 0.98 of the best priority.

QUICK=1: one seed, 1.0 and 1.3 knees, loads as long as fit into 15 minutes.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.load.generator import MAX_GAP_S
from benchmarks.load.knee import LEVEL, find_knee
from benchmarks.load.trials import note, wait_idle
from benchmarks.machine.names import machine_name
from benchmarks.machine.processor import ProcessorShare
from benchmarks.servers.engines import (
    CONTEXT_TOKENS,
    MAX_NUM_SEQS,
    MODEL_NAME,
    PLUGIN_ENVIRONMENT,
    plugin_arguments,
    prefer,
    stop_on_sigterm,
    vllm_missing,
    vllm_servers,
)
from benchmarks.servers.stack import ClassSpec, Stack, StackFleet
from benchmarks.vllm.pair import CLIENT_ABOVE
from benchmarks.vllm.profiled import KNEE_SHARE, profile_vllm
from benchmarks.workflows.analyser import RECORDER, Analyser, point_at
from benchmarks.workflows.client import WorkflowRun, WorkflowTarget, last_due_s, run_workflows
from benchmarks.workflows.plan import (
    CONTENDERS,
    LATENCY,
    QUICK_TIMES,
    TIMES,
    PlannedWorkflow,
    WorkflowContender,
    WorkflowTargets,
    in_turn,
    over_best,
    planned,
    priority_of,
    slo_fields,
)
from benchmarks.workflows.scoring import WorkflowScore, light_targets, score, summary
from controller.core.types import LatencyCoefficients
from controller.predict.answer_lengths import LEAST_ANSWERS
from controller.predict.latency import LatencyModel
from controller.simulator.workloads.concord_mix import KINDS

RESULTS = Path(__file__).resolve().parents[1] / "docs" / "measurements" / "workflows" / machine_name()
LIGHT_SHARE = 0.3  # of the estimated knee
RECORD_SHARE = 2.0  # times the light rate
LIGHT_SEED, RECORD_SEED, FIRST_SEED = 5000, 5100, 5300
RECORDED_CALLS, QUICK_RECORDED_CALLS = 4_000, 700
LIGHT_CUTOFF_S = 180.0  # the light run must be answered whole, on a slow machine too
WARMING = 6  # workflows that nobody measures
START_S = 900.0  # a server needs half a minute of a core, which other work may share
QUICK_BUDGET_S = 14.5 * 60
QUICK_RUN_OVERHEAD_S = 8.0  # to start a gateway and wait for idle engines
SHORTEST_S = 12.0
TAIL_STAGES = 2  # how long a run goes on after its last arrival, in deadlines of a stage
RETENTION_S = 600  # of answers of steps, without which a tenant's requests have no step keys
_ENDED = re.compile(r"(?m)^vllm:request_success_total\{[^}]*\} ([0-9.e+]+)")
# Generous, since requests name their own targets; classes tell types apart. The usual waiting time of a class, 5 s, is
# for the first tokens of latency requests: the calls of the others may wait until they, or their workflow, are due.
LONG_S = 600.0
CLASSES = tuple(ClassSpec(kind, LONG_S, 10.0, None if kind == LATENCY else LONG_S) for kind in KINDS)


@dataclass(slots=True)
class Servers:
    """Addresses of the two servers with vLLM's own scheduler, and of the two with ours."""

    own: Sequence[str]
    plugin: Sequence[str]


@contextlib.contextmanager
def servers(folder: Path, order: str | None) -> Iterator[Servers]:
    """On the same two cores; only one pair is under load at a time. `order`: of the plug-in; None: without its pair."""
    with vllm_servers(2, folder / "own", timeout_s=START_S) as own:
        urls = [engine.url for engine in own]
        if order is None:
            yield Servers(urls, ())
            return
        ours = ("--scheduling-policy", "fcfs", *plugin_arguments({"order": order}))
        with vllm_servers(
            2, folder / "plugin", arguments=ours, environment=PLUGIN_ENVIRONMENT, timeout_s=START_S
        ) as plugin:
            yield Servers(urls, [engine.url for engine in plugin])


def answered(urls: Sequence[str]) -> float:
    """Requests that these servers have ended, by their metrics."""
    found = 0.0
    for url in urls:
        with urllib.request.urlopen(f"{url}/metrics", timeout=10) as reply:
            found += sum(float(value) for value in _ENDED.findall(reply.read().decode()))
    return found


class WorkflowBench:
    """Runs plans on the servers. `targets` are known after `light`."""

    def __init__(self, stack: Stack, engines: Servers, records: Path | None = None) -> None:
        self.stack, self.engines = stack, engines
        self.records = records  # file, to which lines are added
        self.analyser = Analyser(stack)
        self.targets = WorkflowTargets(0.0, 0.0, 0.0)
        self._runs = self._gateway_pid = 0

    def warm(self, rate: float, duration_s: float) -> None:
        """A server's first steps take longer."""
        plan = planned(rate, LIGHT_SEED, duration_s)
        for urls in (self.engines.own, self.engines.plugin):
            if urls:
                run_workflows(plan[:WARMING], WorkflowTarget(urls, MODEL_NAME), duration_s + LIGHT_CUTOFF_S)

    def light(self, rate: float, duration_s: float, scale: float) -> None:
        """Measure the targets. Raises RuntimeError if not all was answered."""
        plan = planned(rate, LIGHT_SEED, duration_s)
        self.targets = light_targets(self._direct(CONTENDERS[0], plan, duration_s + LIGHT_CUTOFF_S), scale)
        note(f"light run of {len(plan)} workflows at {rate:.2f}/s: {self.targets}")

    def record(self, rate: float, calls: int) -> None:
        """Let a gateway serve and record an earlier run of at least so many calls. Raises RuntimeError if it answered
        too few to learn from.
        """
        duration_s, plan = 10.0, planned(rate, RECORD_SEED, 10.0)
        while sum(len(stage) for each in plan for stage in each.stages) < calls:
            duration_s += 10.0
            plan = planned(rate, RECORD_SEED, duration_s)
        with self._gateway(RECORDER) as url:
            run = run_workflows(plan, self._through(url), last_due_s(plan, self.targets) + LIGHT_CUTOFF_S)
        found = score(run, self.targets, duration_s)
        note(f"recorded {dict(found.calls)} in {duration_s:.0f} s at {rate:.2f}/s: {found.workflow_attainment:.3f}")
        answers = found.calls.get("ok", 0)
        if answers < LEAST_ANSWERS:
            raise RuntimeError(f"{answers} answers were recorded, {LEAST_ANSWERS} are needed: give a higher --recorded")
        self.analyser.wait_recorded(answers)

    def knee(self, start: float, duration_s: float, factor: float, seeds: int) -> float:
        def measure(rate: float) -> float:
            shares = []
            for turn in range(seeds):
                found = self.run(CONTENDERS[0], compared(rate, turn, duration_s), duration_s)
                note(f"    round robin at {rate:.2f} workflows/s: {found.workflow_attainment:.3f}  {types(found)}")
                shares.append(found.workflow_attainment)
            return median(shares)

        return find_knee(measure, start, factor)[0]

    def run(self, contender: WorkflowContender, plan: Sequence[PlannedWorkflow], duration_s: float) -> WorkflowScore:
        until_s = last_due_s(plan, self.targets)
        if contender.direct:
            return score(self._direct(contender, plan, until_s), self.targets, duration_s)
        urls = self.engines.plugin if contender.plugin else self.engines.own
        point_at(self.stack, urls)
        self.analyser.put(in_force=contender.analyser)
        self.analyser.hand_on(contender.name)
        with self._gateway(contender.name, urls, contender.policy) as url:
            self.analyser.wait_used(url, in_force=contender.analyser)
            share = ProcessorShare({"gateway": self._gateway_pid})
            began = self.analyser.now()
            run = run_workflows(plan, self._through(url), until_s)
            found = replace(score(run, self.targets, duration_s), cpu_share=share.read())
            self._keep(contender.name, len(plan) / duration_s, began, sum(found.calls.values()))
        return found

    def _keep(self, contender: str, rate: float, began: float, calls: int) -> None:
        """Add what was recorded of the requests of a run to the file, if there is one."""
        if self.records is not None:
            rows = self.analyser.records_since(began, calls)
            with self.records.open("a") as file:
                file.writelines(json.dumps({"contender": contender, "rate": rate, **row}) + "\n" for row in rows)

    def _direct(self, contender: WorkflowContender, plan: Sequence[PlannedWorkflow], until_s: float) -> WorkflowRun:
        kind = contender.priority or "none"
        wait_idle(self.engines.own)
        target = WorkflowTarget(
            self.engines.own, MODEL_NAME, fields=lambda sent: {"priority": priority_of(kind, sent, self.targets)}
        )
        with self.stack.stopped():
            return run_workflows(plan, target, until_s)

    @contextlib.contextmanager
    def _gateway(self, name: str, urls: Sequence[str] = (), policy: str = "slackline") -> Iterator[str]:
        """Raises RuntimeError if the servers meant answered nothing through it."""
        urls = urls or self.engines.own
        wait_idle(urls)
        before = answered(urls)
        with self.stack.gateway(policy, gateway_id=name) as gateway:
            self._gateway_pid = gateway.pid
            yield gateway.url
        if answered(urls) <= before:
            raise RuntimeError(f"{name}: the servers {urls} answered nothing")

    def _through(self, url: str) -> WorkflowTarget:
        self._runs += 1
        name, headers = f"run{self._runs}", {"Authorization": f"Bearer {self.stack.api_key}"}
        return WorkflowTarget([url], MODEL_NAME, headers, lambda sent: slo_fields(sent, self.targets, name))


def compared(rate: float, turn: int, duration_s: float) -> list[PlannedWorkflow]:
    """The plan of one seed. The same for the knee and all loads, or a knee would be one of other workflows."""
    return planned(rate, FIRST_SEED + 37 * turn, duration_s, later=True)


def types(found: WorkflowScore) -> str:
    return " ".join(f"{kind} {share:.2f}" for kind, share in found.by_type.items())


def estimated_knee(fleet: StackFleet) -> float:
    """Workflows/s of all servers at KNEE_SHARE of what the profile gives for a batch half full."""
    if fleet.coefficients is None:
        raise ValueError("no profile to estimate a knee from")
    model = LatencyModel(LatencyCoefficients(**fleet.coefficients))
    plan = planned(10.0, LIGHT_SEED, 60.0)
    seconds = 0.0
    for call in (call for each in plan for stage in each.stages for call in stage):
        step_s = model.marginal_decode(len(call.prompt) + call.output_tokens // 2, fleet.max_num_seqs / 2)
        seconds += model.prefill([len(call.prompt)]) + call.output_tokens * step_s
    return KNEE_SHARE * len(fleet.urls) * len(plan) / seconds


def compare(
    bench: WorkflowBench, contenders: Sequence[WorkflowContender], times: float, knee: float, seeds: int, load_s: float
) -> dict[str, Any]:
    """One entry of `by_load`."""
    rate = times * knee
    note(f"{times:g} knees: {rate:.2f} workflows/s")
    scores: dict[str, list[WorkflowScore]] = {each.name: [] for each in contenders}
    for turn in range(seeds):
        plan = compared(rate, turn, load_s)
        for contender in in_turn(contenders, turn + round(10 * times)):
            found = bench.run(contender, plan, load_s)
            scores[contender.name].append(found)
            stalled = f", stalled {found.largest_gap_s:.2f} s" if found.largest_gap_s > MAX_GAP_S else ""
            note(
                f"    {contender.name:26} {found.workflow_attainment:.3f}  {types(found)}  {dict(found.calls)}"
                f"  late {dict(found.latency_missed)}  {found.goodput_tokens_per_s:.0f} tokens/s{stalled}"
            )
    row: dict[str, Any] = {each.name: summary(scores[each.name]) for each in contenders}
    return {
        "times_knee": times,
        "rate": round(rate, 3),
        "duration_s": load_s,
        **row,
        "over_best": over_best(row),
    }


def fitting_s(spent_s: float, runs: int, tail_s: float) -> float:
    """Seconds of arrivals of each run that fit into QUICK's time. `tail_s`: from the last arrival to the end."""
    each_s = (QUICK_BUDGET_S - spent_s) / runs - QUICK_RUN_OVERHEAD_S - tail_s
    return float(round(min(60.0, max(SHORTEST_S, each_s))))


def table(report: dict[str, Any]) -> str:
    lines = [f"{'load':22}{'policy':26}{'in time':>8}{'tokens/s':>10}{'workflows/s':>12}  by type"]
    for entry in report["by_load"]:
        load = f"{entry['times_knee']:g} knees = {entry['rate']:.2f}/s"
        for name in (each.name for each in CONTENDERS if each.name in entry):
            row = entry[name]
            shown = " ".join(f"{kind} {share:.2f}" for kind, share in row["by_type"].items())
            lines.append(
                f"{load:22}{name:26}{row['workflow_attainment']:>8.3f}{row['goodput_tokens_per_s']:>10.0f}"
                f"{row['goodput_requests_per_s']:>12.2f}  {shown}"
            )
            load = ""
        lines += [f"{'':22}{name}: {figures}" for name, figures in entry["over_best"].items()]
    return "\n".join(lines)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.bench_workflows", description=__doc__.splitlines()[0])
    names = [each.name for each in CONTENDERS]
    parser.add_argument("--seeds", type=int, help="runs of each contender and load (default: 3; QUICK=1: 1)")
    parser.add_argument(
        "--seconds", type=float, help="arrivals of each run, the knee's too (default: 60; QUICK=1: what fits)"
    )
    parser.add_argument("--times", default="", help="only these loads, in knees, comma-separated")
    usual = ",".join(each.name for each in CONTENDERS if each.usual)
    parser.add_argument("--contenders", default=usual, help=f"only these of {', '.join(names)}; comma-separated")
    parser.add_argument("--knee", type=float, help="workflows/s, instead of searching for it")
    parser.add_argument("--light-rate", type=float, help="workflows/s of the light run (default: from the profile)")
    parser.add_argument("--light-seconds", type=float, help="arrivals of the light run (default: 120; QUICK=1: 40)")
    parser.add_argument("--targets", help="TTFT, TBT and the deadline of a stage in seconds, instead of a light run's")
    parser.add_argument("--slo-scale", type=float, default=1.0, help="factor on all targets (Concord Fig. 6.9)")
    parser.add_argument("--recorded", type=int, help="calls that the analyser learns from")
    parser.add_argument("--plugin-order", default="s_edf", help="of the plug-in's queue")
    parser.add_argument("--records", type=Path, help="file for the records of all requests through our gateways")
    arguments = parser.parse_args()
    wanted = [name.strip() for name in arguments.contenders.split(",") if name.strip()]
    if unknown := sorted(set(wanted) - set(names)):
        parser.error(f"--contenders: unknown {unknown[0]!r}; valid: {', '.join(names)}")
    arguments.contenders = [each for each in CONTENDERS if each.name in wanted]
    if (arguments.seeds is not None and arguments.seeds < 1) or arguments.slo_scale <= 0:
        parser.error("--seeds must be at least 1, and --slo-scale above 0")
    if arguments.recorded is not None and arguments.recorded <= LEAST_ANSWERS:
        parser.error(f"--recorded must be above {LEAST_ANSWERS}, since not every call is answered")
    if arguments.targets is not None:
        try:
            arguments.targets = WorkflowTargets(*(float(each) for each in arguments.targets.split(",")))
        except (TypeError, ValueError):
            parser.error("--targets: three numbers of seconds, comma-separated")
        if min(arguments.targets) <= 0:
            parser.error("--targets must be above 0")
    try:
        arguments.times = tuple(float(each) for each in arguments.times.split(",") if each.strip())
    except ValueError:
        parser.error("--times: numbers, comma-separated")
    return arguments


def measure(bench: WorkflowBench, arguments: argparse.Namespace, quick: bool, started: float) -> dict[str, Any]:
    guess = estimated_knee(bench.stack.fleet)
    light = arguments.light_rate or LIGHT_SHARE * guess
    light_s = arguments.light_seconds or (40.0 if quick else 120.0)
    bench.warm(light, light_s)
    if arguments.targets is None:
        bench.light(light, light_s, arguments.slo_scale)
    else:
        bench.targets = WorkflowTargets(*(each * arguments.slo_scale for each in arguments.targets))
    contenders = arguments.contenders
    gateways = [each for each in contenders if not each.direct]
    if gateways:
        bench.record(RECORD_SHARE * light, arguments.recorded or (QUICK_RECORDED_CALLS if quick else RECORDED_CALLS))
    seeds = arguments.seeds or (1 if quick else 3)
    # A queue that grows shows late: the knee of short runs is beyond that of long ones.
    knee_s = arguments.seconds or (20.0 if quick else 60.0)
    knee = arguments.knee or bench.knee(RECORD_SHARE * light, knee_s, 1.4 if quick else 1.2, seeds)
    if any(each.analyser for each in gateways):
        bench.analyser.train()
        note(f"analyser: {bench.analyser.judged}")
    loads = arguments.times or (QUICK_TIMES if quick else TIMES)
    spent_s = time.monotonic() - started
    fits_s = fitting_s(spent_s, len(loads) * len(contenders), TAIL_STAGES * bench.targets.e2e_s) if quick else 60.0
    report: dict[str, Any] = {
        "by_load": [],
        "targets": {
            **bench.targets._asdict(),
            "from": f"P95 at {light:.2f} workflows/s" if arguments.targets is None else "--targets",
            "scale": arguments.slo_scale,
        },
        "knee": {"rate": round(knee, 3), "level": LEVEL, "from": "--knee" if arguments.knee else "measured"},
        "analyser": bench.analyser.judged,
        "plugin_order": arguments.plugin_order,
        "seeds": seeds,
        "quick": quick,
        "profile": bench.stack.fleet.coefficients,
    }
    for times in loads:
        report["by_load"].append(compare(bench, contenders, times, knee, seeds, arguments.seconds or fits_s))
        report["seconds"] = round(time.monotonic() - started)
        RESULTS.mkdir(parents=True, exist_ok=True)
        (RESULTS / ("quick.json" if quick else "report.json")).write_text(json.dumps(report, indent=1) + "\n")
    return report


@contextlib.contextmanager
def prepared(arguments: argparse.Namespace, quick: bool) -> Iterator[WorkflowBench]:
    """Servers, profile and stack. Raises RuntimeError for what does not start."""
    with tempfile.TemporaryDirectory(prefix="slackline-workflows-") as name:
        folder = Path(name)
        folder.chmod(0o755)  # PostgreSQL runs as another user
        order = arguments.plugin_order if any(each.plugin for each in arguments.contenders) else None
        with servers(folder / "logs", order) as engines:
            profiled = profile_vllm(engines.own, RESULTS / "profile.json", quick)
            fleet = StackFleet(
                MODEL_NAME, engines.own, "vllm", MAX_NUM_SEQS, CLASSES, profiled.coefficients, CONTEXT_TOKENS,
                profiled.kv_capacity_tokens, retention_s=RETENTION_S,
            )  # fmt: skip
            with Stack(folder / "data", fleet) as stack:
                yield WorkflowBench(stack, engines, arguments.records)


def main() -> int:
    arguments = parse()
    quick = os.environ.get("QUICK", "") not in ("", "0")
    started = time.monotonic()
    if (missing := vllm_missing()) is not None:
        print(f"bench-workflows: {missing}", file=sys.stderr)
        return 1
    stop_on_sigterm()
    prefer(os.getpid(), above=CLIENT_ABOVE)
    try:
        with prepared(arguments, quick) as bench:
            report = measure(bench, arguments, quick, started)
    except RuntimeError as error:  # servers or a gateway that do not start, no knee, or no targets
        print(f"bench-workflows: {error}", file=sys.stderr)
        return 1
    print(table(report))
    print(json.dumps(report))
    return 0


if __name__ == "__main__":
    sys.exit(main())
