"""What a run of workflows earned (Concord ch. 3), and the targets of a light one (6.1).

A compound request counts once, all or nothing, and none of its calls counts by itself. Goodput in tokens: of a latency
request the answer's tokens that came by TTFT + i x TBT; of a deadline request its prompt and answer, if the answer
ended in time; of a compound one the prompts and answers of all calls, if the last answer came in time.
"""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from benchmarks.load.scoring import percentile
from benchmarks.workflows.client import CallTiming, WorkflowRun, WorkflowTiming
from benchmarks.workflows.plan import LATENCY, WorkflowTargets
from controller.simulator.workloads.concord_mix import KINDS

TARGET_SHARE = 0.95


@dataclass(frozen=True, slots=True)
class WorkflowScore:
    """One run. Shares are of workflows, a single request being one. Goodput is a second of arrivals. `calls`: by
    outcome."""

    workflow_attainment: float
    by_type: Mapping[str, float]
    goodput_tokens_per_s: float
    goodput_requests_per_s: float
    workflows: int
    calls: Mapping[str, int]
    largest_gap_s: float
    refusals: Mapping[str, int] = field(default_factory=dict)
    latency_missed: Mapping[str, int] = field(default_factory=dict)  # latency requests by what was late; both: in each
    cpu_share: Mapping[str, float] = field(default_factory=dict)  # of one core, by process, while the load lasted


def in_time(timing: WorkflowTiming, targets: WorkflowTargets) -> bool:
    if not timing.done:
        return False
    if timing.workflow.kind == LATENCY:
        (call,) = timing.calls
        return call.ttft_s <= targets.ttft_s and call.tbt_s <= targets.tbt_s
    return timing.e2e_s <= targets.deadline_s(timing.workflow)


def latency_missed(run: WorkflowRun, targets: WorkflowTargets) -> dict[str, int]:
    """Latency requests that were not in time: by TTFT, by TBT, and those that were not answered."""
    found: Counter[str] = Counter()
    for timing in run.workflows:
        if timing.workflow.kind == LATENCY and not timing.done:
            found["unanswered"] += 1
        elif timing.workflow.kind == LATENCY:
            (call,) = timing.calls
            found["ttft"] += call.ttft_s > targets.ttft_s
            found["tbt"] += call.tbt_s > targets.tbt_s
    return {name: count for name, count in found.items() if count}


def goodput_tokens(timing: WorkflowTiming, targets: WorkflowTargets) -> int:
    if timing.workflow.kind == LATENCY:
        return sum(_on_time(call, targets) for call in timing.calls)
    return timing.workflow.tokens if in_time(timing, targets) else 0


def _on_time(call: CallTiming, targets: WorkflowTargets) -> int:
    """Tokens by the timeline, whatever became of the request. Tokens without an event of their own count for nothing
    until the answer has ended, and then as its last event."""
    missing = call.output_tokens - len(call.events) if call.outcome == "ok" else 0
    times = [*call.events, *call.events[-1:] * max(0, missing)]
    return sum(at - call.due <= targets.ttft_s + i * targets.tbt_s for i, at in enumerate(times[: call.output_tokens]))


def score(run: WorkflowRun, targets: WorkflowTargets, duration_s: float) -> WorkflowScore:
    """`duration_s`: of the arrivals. Raises ValueError for a run without workflows."""
    if not run.workflows:
        raise ValueError("a run without workflows has no score")
    met = {kind: [in_time(each, targets) for each in run.workflows if each.workflow.kind == kind] for kind in KINDS}
    attained = sum(sum(of) for of in met.values())
    calls = [call for each in run.workflows for call in each.calls]
    return WorkflowScore(
        workflow_attainment=attained / len(run.workflows),
        by_type={kind: sum(of) / len(of) for kind, of in met.items() if of},
        goodput_tokens_per_s=sum(goodput_tokens(each, targets) for each in run.workflows) / duration_s,
        goodput_requests_per_s=attained / duration_s,
        workflows=len(run.workflows),
        calls=dict(Counter(call.outcome for call in calls)),
        largest_gap_s=run.largest_gap_s,
        refusals=dict(Counter(call.refusal[:120] for call in calls if call.refusal)),
        latency_missed=latency_missed(run, targets),
    )


def light_targets(run: WorkflowRun, scale: float = 1.0) -> WorkflowTargets:
    """The 95 % points of a light run, times `scale`: of the first token and of the time between two tokens of latency
    requests, and of the whole answers of all other calls. Raises RuntimeError without such calls, or with unanswered
    ones.
    """
    calls = [(each.workflow.kind, call) for each in run.workflows for call in each.calls]
    if any(call.outcome != "ok" for _, call in calls) or not all(each.done for each in run.workflows):
        raise RuntimeError("the light run left calls unanswered: no targets from it")
    paced = [call for kind, call in calls if kind == LATENCY]
    whole = [call.e2e_s for kind, call in calls if kind != LATENCY]
    gaps = [after - before for call in paced for before, after in zip(call.events, call.events[1:], strict=False)]
    if not gaps or not whole:
        raise RuntimeError("the light run is too short: it lacks requests of a type")
    firsts = [call.ttft_s for call in paced]
    found = (percentile(values, TARGET_SHARE) * scale for values in (firsts, gaps, whole))
    return WorkflowTargets(*(float(f"{each:.4g}") for each in found))


def summary(scores: Sequence[WorkflowScore]) -> dict[str, Any]:
    """Medians over seeds; `workflow_attainment_spread`: lowest and highest."""
    attained = [each.workflow_attainment for each in scores]
    return {
        "workflow_attainment": round(statistics.median(attained), 4),
        "workflow_attainment_spread": [round(min(attained), 4), round(max(attained), 4)],
        "by_type": {
            kind: round(statistics.median(each.by_type[kind] for each in scores if kind in each.by_type), 4)
            for kind in KINDS
            if any(kind in each.by_type for each in scores)
        },
        "goodput_tokens_per_s": round(statistics.median(each.goodput_tokens_per_s for each in scores), 2),
        "goodput_requests_per_s": round(statistics.median(each.goodput_requests_per_s for each in scores), 4),
        "workflows": sum(each.workflows for each in scores),
        "calls": dict(sum((Counter(each.calls) for each in scores), Counter())),
        "refusals": dict(sum((Counter(each.refusals) for each in scores), Counter())),
        "latency_missed": dict(sum((Counter(each.latency_missed) for each in scores), Counter())),
        "runs": len(scores),
        "largest_gap_s": round(max(each.largest_gap_s for each in scores), 3),
        "cpu_share": {
            name: round(statistics.median(each.cpu_share.get(name, math.nan) for each in scores), 4)
            for name in dict.fromkeys(name for each in scores for name in each.cpu_share)
        },
    }
