"""The plans of `bench-workflows` in the simulator: how policies compare on many seeds, in seconds instead of minutes.

    python -m benchmarks.workflows.simulated --rates 1.0,1.3,1.7 --seeds 12

The same workflows, their deadlines and the measured step times of the two vLLM, in virtual time. Lengths and stages are
predicted with an error (`Noisy`), as by an analyser; `--error 0.8` is what the forest's bounds of live runs had.

`--beside-ms` and `--scatter` make the servers those of one small machine: a step takes that much longer while the other
server runs one, and their speeds vary by a factor whose logarithm has that deviation, from half second to half second.

Round robin and vLLM's priority by class and by due time are the contenders that need nothing of ours; `--overrides`
changes settings of slackline. Priorities tell little apart here: the servers have more slots than these rates fill.
With `--hindsight` slackline also serves each plan again and again without the dearest fifth of the workflows that were
late, until none is: what it keeps then, of all workflows, can be reached by refusing the right ones. No policy knows
these beforehand.

Printed for each rate and policy: the share of all workflows in time, and of each type. The last line is JSON:
`by_rate[]` with `workflow_attainment` and `by_type` of each policy, and slackline's `over_best`.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

from benchmarks.servers.engines import MAX_NUM_SEQS
from benchmarks.workflows.plan import LATENCY, PlannedWorkflow, WorkflowTargets, planned
from controller.core.errors import ConfigError
from controller.core.noise import standard_normal
from controller.core.types import LatencyCoefficients, Targets
from controller.simulator.experiment import ExperimentPlan, parse_experiment
from controller.simulator.runner import run_once
from controller.simulator.workloads.concord_mix import KINDS, ConcordMix
from controller.simulator.workloads.foresight import Noisy
from controller.simulator.workloads.program_workload import ProgramMix
from controller.simulator.workloads.programs import Foresight, Program, ProgramCall, Programs, ProgramStage, Speeds
from controller.simulator.workloads.stage_pace import StagePace
from controller.slo.stage_deadlines import LIVE_RULE

# As `bench-workflows` measured them on 2026-11-29 (docs/reference/benchmarks.md, "Workflows with one deadline").
TARGETS = WorkflowTargets(0.2994, 0.0244, 5.202)
PROFILE = {
    "prefill_a": 0.02355, "prefill_b": 4.26e-4, "prefill_c": 1.42e-7,
    "decode_a": 0.01748, "decode_b": 2.55e-6, "decode_c": 1.05e-3,
}  # fmt: skip
CONTEXT_TOKENS, KV_TOKENS = 4096, 65_536
LATENCY_WAITS_S, OTHERS_WAIT_S = 5.0, 600.0  # as the classes of `bench-workflows`
LOOSE_TPOT_S = 10.0
ERROR = 0.3  # deviation of the logarithm, of lengths (without --error) and of stages' times
FIRST_SEED = 5300
SPEEDS = 1200  # half seconds after which a server's speeds begin again
HINDSIGHT, DROPPED = "slackline, in hindsight", 5  # one in so many of the late ones is refused in the next turn
POLICIES = ("slackline", "round_robin", "engine_priority_class", "engine_priority_deadline")


@dataclass(frozen=True, slots=True)
class PlannedMix(ProgramMix):
    """Workflows of `planned` as programs of the simulator. `duration_s`: of their arrivals."""

    duration_s: float = 60.0
    targets: WorkflowTargets = TARGETS
    refused: frozenset[int] = frozenset()  # numbers of workflows that are not served
    told: bool = False  # whether slackline is told bounds of lengths

    def programs(
        self, rate: float | None, seed: int, latency: LatencyCoefficients, foresight: Foresight | None = None
    ) -> Programs:
        plan = planned(rate or 1.0, seed, self.duration_s, later=True)
        found = [program_of(each, self.targets) for each in plan if each.number not in self.refused]
        speeds = Speeds(latency.decode_a + 8 * latency.decode_c, latency.prefill_b)
        return Programs(found, foresight or self.foresight, speeds, "requests", StagePace(), LIVE_RULE, self.told)


def program_of(workflow: PlannedWorkflow, target: WorkflowTargets) -> Program:
    tools = (*workflow.tools_s, 0.0)
    stages = tuple(
        ProgramStage(tuple(ProgramCall(len(call.prompt), call.output_tokens) for call in calls), tool_s)
        for calls, tool_s in zip(workflow.stages, tools, strict=True)
    )
    deadline_s = target.deadline_s(workflow)
    targets = Targets(deadline_s, LOOSE_TPOT_S, deadline_s, OTHERS_WAIT_S)
    if workflow.kind == LATENCY:
        targets = Targets(target.ttft_s, target.tbt_s, None, LATENCY_WAITS_S)
    return Program(f"p{workflow.number}", workflow.at, workflow.kind, stages, targets, workflow.app)


def experiment(
    policies: Sequence[str],
    seeds: Sequence[int],
    duration_s: float,
    overrides: Mapping[str, Any],
    targets: WorkflowTargets = TARGETS,
    profile: Mapping[str, float] = PROFILE,
    believed: Mapping[str, float] | None = None,
    error: float | None = None,
    beside_s: float = 0.0,
    scatter: float = 0.0,
) -> ExperimentPlan:
    """`profile`: true step times; `believed`: those that slackline starts from, if others. `error`: of the bounds of
    lengths that the dispatcher is told; None: it learns mean lengths, and engines are told bounds with ERROR.
    `beside_s`: how much longer a step takes while the other server runs one. `scatter`: of their speeds (`speeds`).
    Raises ConfigError for an unknown policy or setting."""
    raw = {
        "name": "workflows on two vLLM",
        "instances": {
            "count": 2, "profile": dict(profile), "believed": dict(believed or profile), "kv_tokens": KV_TOKENS,
            "max_num_seqs": MAX_NUM_SEQS,
            "max_num_batched_tokens": 2048, "max_model_len": CONTEXT_TOKENS,
        },
        "policies": [
            {"name": name, "label": name, "overrides": dict(overrides) if name == "slackline" else {}}
            for name in policies
        ],
        "seeds": list(seeds),
        "rates": [1.0],
        "settings": {"cutoff_s": OTHERS_WAIT_S, "network_s": 0.001, "beside_s": beside_s, **speeds(scatter)},
        "workload": {"kind": "mix", "mix": "2-task", "duration_s": duration_s},
    }  # fmt: skip
    told, seen = error is not None, Noisy(ERROR if error is None else error, graph_error=ERROR)
    workload = PlannedMix(ConcordMix(), 0, None, 1.0, (), seen, duration_s=duration_s, targets=targets, told=told)
    return replace(parse_experiment(raw, _no_file, _no_file), workload=workload)


def speeds(scatter: float) -> dict[str, Any]:
    """Setting `machine_speed` of two servers: factors with mean 1, drawn for each half second; none without scatter."""
    if not scatter:
        return {}
    series = [
        [
            math.exp(scatter * standard_normal(f"speed {server} {period}", FIRST_SEED) - scatter**2 / 2)
            for period in range(SPEEDS)
        ]
        for server in range(2)
    ]
    return {"machine_speed": {"series": series, "period_s": 0.5}}


def _no_file(name: str) -> Any:
    raise ConfigError(f"this experiment reads no file, not {name}", field="instances.profile")


def compare(plan: ExperimentPlan, rate: float) -> dict[str, dict[str, Any]]:
    """By policy: `workflow_attainment` and `by_type`, over the workflows of all seeds."""
    found = {}
    for contender in plan.contenders:
        workflows, in_time = Counter[str](), Counter[str]()
        for seed in plan.seeds:
            for program in run_once(plan, contender, rate, seed).programs:
                workflows[program.kind] += 1
                in_time[program.kind] += program.attained
        found[contender.label] = {
            "workflow_attainment": round(in_time.total() / workflows.total(), 4),
            "by_type": {kind: round(in_time[kind] / workflows[kind], 3) for kind in KINDS if workflows[kind]},
            "workflows": workflows.total(),
        }
    return found


def hindsight(plan: ExperimentPlan, rate: float) -> dict[str, Any]:
    """As `compare` for slackline, with the workflows refused at the start by which the most are in time."""
    contender = next(each for each in plan.contenders if each.label == "slackline")
    mix = cast(PlannedMix, plan.workload)
    workflows, in_time = Counter[str](), Counter[str]()
    for seed in plan.seeds:
        refused: frozenset[int] = frozenset()
        most: Counter[str] = Counter()
        while True:
            tried = replace(plan, workload=replace(mix, refused=refused))
            programs = run_once(tried, contender, rate, seed).programs
            if not refused:
                workflows.update(each.kind for each in programs)
            kept = Counter(each.kind for each in programs if each.attained)
            most = max(most, kept, key=Counter.total)
            late = sorted((each for each in programs if not each.attained), key=lambda each: each.tokens)
            if not late:
                break
            refused |= {int(each.id[1:]) for each in late[-max(1, len(late) // DROPPED) :]}
        in_time += most
    return {
        "workflow_attainment": round(in_time.total() / workflows.total(), 4),
        "by_type": {kind: round(in_time[kind] / workflows[kind], 3) for kind in KINDS if workflows[kind]},
        "workflows": workflows.total(),
    }


def over_best(row: Mapping[str, Mapping[str, Any]]) -> float | None:
    """Slackline's attainment, times that of the best other policy; None if one of the two is missing."""
    others = [of["workflow_attainment"] for name, of in row.items() if name not in ("slackline", HINDSIGHT)]
    if "slackline" not in row or not others or max(others) <= 0:
        return None
    return round(float(row["slackline"]["workflow_attainment"]) / max(others), 3)


def _numbers(profile: Mapping[str, float]) -> str:
    return ",".join(f"{each:g}" for each in profile.values())


def _profile(words: str) -> dict[str, float]:
    """Raises ValueError for anything but as many numbers as PROFILE has."""
    return dict(zip(PROFILE, map(float, words.split(",")), strict=True))


def parse(words: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.workflows.simulated", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("--rates", default="1.0,1.3,1.7,2.2", help="workflows/s, comma-separated")
    parser.add_argument("--seeds", type=int, default=12)
    parser.add_argument("--first-seed", type=int, default=FIRST_SEED)
    parser.add_argument("--seconds", type=float, default=60.0, help="arrivals of each run")
    parser.add_argument(
        "--targets", default=",".join(map(str, TARGETS)), help="TTFT, TBT and the deadline of a stage, seconds"
    )
    parser.add_argument("--profile", default=_numbers(PROFILE), help=f"true step times: {', '.join(PROFILE)}")
    parser.add_argument("--believed", help="the same six numbers, as slackline believes them at first")
    parser.add_argument(
        "--error", type=float, help="tell slackline bounds of each answer's length: deviation of the logarithm"
    )
    parser.add_argument("--beside-ms", type=float, default=0.0, help="added to a step while the other server runs one")
    parser.add_argument("--scatter", type=float, default=0.0, help="of the servers' speeds: deviation of the logarithm")
    parser.add_argument("--policies", default=",".join(POLICIES), help="comma-separated")
    parser.add_argument("--overrides", default="{}", help='settings of slackline, as {"pacing": {"patience": 0.5}}')
    parser.add_argument("--hindsight", action="store_true", help="and what refusing the right workflows would keep")
    arguments = parser.parse_args(words)
    try:
        arguments.rates = [float(each) for each in arguments.rates.split(",")]
    except ValueError:
        parser.error("--rates: numbers, comma-separated")
    try:
        targets = WorkflowTargets(*(float(each) for each in arguments.targets.split(",")))
    except (TypeError, ValueError):
        parser.error("--targets: three numbers of seconds, comma-separated")
    try:
        profile = _profile(arguments.profile)
        believed = _profile(arguments.believed) if arguments.believed else None
    except ValueError:
        parser.error(f"--profile and --believed: {len(PROFILE)} numbers, comma-separated")
    if not 0 <= arguments.scatter <= 1:
        parser.error("--scatter must lie from 0 to 1")
    if arguments.seeds < 1 or arguments.seconds <= 0 or min(*arguments.rates, *targets) <= 0:
        parser.error("--seeds must be at least 1, --seconds, --rates and --targets above 0")
    try:
        arguments.overrides = json.loads(arguments.overrides)
        seeds = [arguments.first_seed + 37 * turn for turn in range(arguments.seeds)]
        policies = arguments.policies.split(",")
        if arguments.hindsight and "slackline" not in policies:
            parser.error("--hindsight needs slackline among --policies")
        arguments.plan = experiment(
            policies, seeds, arguments.seconds, arguments.overrides, targets, profile, believed, arguments.error,
            arguments.beside_ms / 1e3, arguments.scatter,
        )  # fmt: skip
    except (ValueError, ConfigError) as error:
        parser.error(f"--policies, --overrides, --error, --beside-ms or --scatter: {error}")
    return arguments


def main() -> int:
    arguments = parse()
    by_rate = []
    for rate in arguments.rates:
        row = compare(arguments.plan, rate)
        if arguments.hindsight:
            row[HINDSIGHT] = hindsight(arguments.plan, rate)
        for name, of in row.items():
            shown = " ".join(f"{kind} {share:.3f}" for kind, share in of["by_type"].items())
            print(f"{rate:5.2f}/s  {name:26}{of['workflow_attainment']:.3f}  {shown}", flush=True)
        by_rate.append({"rate": rate, **row, "over_best": over_best(row)})
    print(json.dumps({"by_rate": by_rate, "seeds": arguments.seeds, "seconds": arguments.seconds}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
