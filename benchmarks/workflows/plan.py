"""The workflows of `bench-workflows`, their targets, and what each contender says of a call.

Latency, deadline and compound requests 1:1:1 as Poisson arrivals. A latency or deadline request is a workflow of one
call with the lengths of a row of `azure2023_conv`, an eighth of its prompt and a quarter of its answer. What is learned
from has rows of the trace's first half, what is compared of the second. A compound request has the tokens of Concord's
Table 6.1 (`controller/simulator/workloads/concord_mix.py`), an eighth of them, divided among the stages of its
application's PATTERNS, which are chosen here: the paper says that applications have recurring ones, and not which.

No call tells its length: `max_tokens` is one cap for all, and an answer ends at the stop token, which `min_tokens`
forbids until its length is reached and a bias makes certain from then on.
"""

from __future__ import annotations

import csv
import gzip
import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np

from benchmarks.load.lengths import stopped
from benchmarks.load.workloads import FIRST_PLAIN_TOKEN, VOCABULARY
from controller.simulator.workloads.concord_mix import APPS, KINDS, SPREAD, AppMix

LATENCY, DEADLINE, COMPOUND = KINDS
TRACE = Path(__file__).resolve().parents[1] / "data" / "azure2023_conv.csv.gz"
PROMPT_PART, ANSWER_PART = 8, 4  # of the trace's lengths
COMPOUND_PART = 8  # of the table's, and of its tools' times: the model and its two cores are small
CAP_TOKENS = 320
SHORTEST_ANSWER = 2  # of one token there is no pace


class StageShape(NamedTuple):
    """`calls`: side by side, least and most. `prompt`, `answer`: weight of each call in its workflow's tokens."""

    name: str
    calls: tuple[int, int]
    prompt: float
    answer: float


PATTERNS: Mapping[str, tuple[StageShape, ...]] = {
    "chatbot": (
        StageShape("ask", (1, 1), 1.0, 1.0),
        StageShape("answer", (2, 3), 2.0, 3.0),
        StageShape("merge", (1, 1), 3.0, 2.0),
    ),
    "deep_research": (
        StageShape("plan", (1, 1), 1.0, 1.0),
        StageShape("search", (2, 5), 2.0, 1.0),
        StageShape("read", (2, 5), 3.0, 1.0),
        StageShape("write", (1, 1), 4.0, 4.0),
    ),
}
TIMES = (1.0, 1.3, 1.7)  # knees
QUICK_TIMES = (1.0, 1.3)

Priority = Literal["none", "class", "call", "workflow"]


class WorkflowTargets(NamedTuple):
    """Seconds. `e2e_s`: of a deadline request, and of each stage of a compound one (Concord 6.1)."""

    ttft_s: float
    tbt_s: float
    e2e_s: float

    def deadline_s(self, workflow: PlannedWorkflow) -> float:
        """From the arrival to the last token of all; infinite for a latency request."""
        return math.inf if workflow.kind == LATENCY else self.e2e_s * len(workflow.stages)


class PlannedCall(NamedTuple):
    """`output_tokens` counts the stop token."""

    prompt: tuple[int, ...]
    output_tokens: int


@dataclass(frozen=True, slots=True)
class PlannedWorkflow:
    """`at`: seconds after the start of the run. The calls of a stage are sent `tools_s[stage - 1]` after all of the
    stage before have answered; the first stage's on arrival."""

    number: int
    at: float
    kind: str
    app: str
    stages: tuple[tuple[PlannedCall, ...], ...]
    tools_s: tuple[float, ...]

    @property
    def tokens(self) -> int:
        return sum(len(call.prompt) + call.output_tokens for stage in self.stages for call in stage)


def planned(rate: float, seed: int, duration_s: float, *, later: bool = False) -> list[PlannedWorkflow]:
    """All arrivals of `duration_s` at `rate` workflows/s. `later`: of the trace's second half."""
    rng = np.random.default_rng([seed, 21])
    gaps = rng.exponential(1.0 / rate, math.ceil(2 * rate * duration_s + 50))
    times = [float(at) for at in np.cumsum(gaps) if at < duration_s]
    whole = trace()
    half = whole[len(whole) // 2 :] if later else whole[: len(whole) // 2]
    first = int(rng.integers(len(half)))
    found = []
    for number, (at, kind, app) in enumerate(
        zip(times, rng.integers(len(KINDS), size=len(times)), rng.integers(len(APPS), size=len(times)), strict=True)
    ):
        if KINDS[kind] == COMPOUND:
            found.append(_compound(number, at, APPS[app], rng))
        else:
            call = _call(*half[(first + number) % len(half)], rng)
            found.append(PlannedWorkflow(number, at, KINDS[kind], "", ((call,),), ()))
    return found


@cache
def trace() -> Sequence[tuple[float, float]]:
    """Prompt and answer tokens of its rows, in their order, as they are sent here."""
    with gzip.open(TRACE, "rt") as file:
        rows = csv.DictReader(file)
        return [(int(row["input_tokens"]) / PROMPT_PART, int(row["output_tokens"]) / ANSWER_PART) for row in rows]


def _compound(number: int, at: float, app: AppMix, rng: np.random.Generator) -> PlannedWorkflow:
    shapes = PATTERNS[app.name]
    widths = [int(rng.integers(shape.calls[0], shape.calls[1] + 1)) for shape in shapes]
    each = [shape for shape, width in zip(shapes, widths, strict=True) for _ in range(width)]
    prompts = _parts(app.compound_prompt.draw(rng) / COMPOUND_PART, [shape.prompt for shape in each], rng)
    answers = _parts(app.compound_output.draw(rng) / COMPOUND_PART, [shape.answer for shape in each], rng)
    calls = iter([_call(prompt, answer, rng) for prompt, answer in zip(prompts, answers, strict=True)])
    stages = tuple(tuple(itertools.islice(calls, width)) for width in widths)
    tools = tuple(float(rng.uniform(*app.tool_s)) / COMPOUND_PART for _ in shapes[1:])
    return PlannedWorkflow(number, at, COMPOUND, app.name, stages, tools)


def _parts(whole: float, weights: Sequence[float], rng: np.random.Generator) -> list[float]:
    """The tokens of the calls by their weights, each with a coefficient of variation of 0.5 (as in `concord_mix`)."""
    drawn = np.array(weights) * rng.gamma(SPREAD, 1.0, len(weights))
    parts: list[float] = (whole * drawn / drawn.sum()).tolist()
    return parts


def _call(prompt: float, answer: float, rng: np.random.Generator) -> PlannedCall:
    tokens = rng.integers(FIRST_PLAIN_TOKEN, VOCABULARY, max(1, round(prompt))).tolist()
    return PlannedCall(tuple(tokens), min(CAP_TOKENS - 1, max(SHORTEST_ANSWER, round(answer))))


@dataclass(frozen=True, slots=True)
class WorkflowContender:
    """`priority`: what the client sends as vLLM's own priority, straight to the engines; None: through a gateway.
    `plugin`: engines with our scheduler. `analyser`: whether the trained versions are in force at the gateway.
    `policy`: of the gateway. `usual`: whether it takes part unless others are named."""

    name: str
    priority: Priority | None = None
    plugin: bool = False
    analyser: bool = False
    policy: str = "slackline"
    usual: bool = True

    @property
    def direct(self) -> bool:
        return self.priority is not None


CONTENDERS = (
    WorkflowContender("round_robin", "none"),
    WorkflowContender("engine_priority_class", "class"),
    WorkflowContender("engine_priority_call", "call"),
    WorkflowContender("engine_priority_workflow", "workflow"),
    WorkflowContender("slackline", analyser=True),
    WorkflowContender("slackline_plugin", plugin=True, analyser=True),
    WorkflowContender("slackline_no_analyser"),
    WorkflowContender("gateway_round_robin", policy="round_robin", usual=False),
)
PRIORITIES = tuple(each.name for each in CONTENDERS if each.priority not in (None, "none"))


class SentCall(NamedTuple):
    """A call as it is sent. `place`: in its stage. `at`: now, in seconds of the run. `parents`: step keys."""

    workflow: PlannedWorkflow
    stage: int
    place: int
    at: float

    @property
    def call(self) -> PlannedCall:
        return self.workflow.stages[self.stage][self.place]

    @property
    def key(self) -> str:
        return step_key(self.stage, self.place)

    @property
    def parents(self) -> list[str]:
        if not self.stage:
            return []
        return [step_key(self.stage - 1, index) for index in range(len(self.workflow.stages[self.stage - 1]))]


def step_key(stage: int, index: int) -> str:
    return f"s{stage}-{index}"


def body_of(sent: SentCall, model: str) -> dict[str, Any]:
    """What every contender sends. `min_tokens` is all that differs with the length."""
    return {
        "model": model,
        "prompt": list(sent.call.prompt),
        **stopped(sent.call.output_tokens, CAP_TOKENS),
        "temperature": 0,
        "stream": True,
    }


def priority_of(kind: Priority, sent: SentCall, targets: WorkflowTargets) -> int:
    """vLLM's, least first. `class`: latency, then deadline, then compound. `call` and `workflow`: milliseconds at which
    the call's first token (latency), its answer, or its whole workflow is due."""
    workflow = sent.workflow
    if kind == "none":
        return 0
    if kind == "class":
        return KINDS.index(workflow.kind)
    if workflow.kind == LATENCY:
        return round(1000 * (workflow.at + targets.ttft_s))
    if kind == "call":
        return round(1000 * (sent.at + targets.e2e_s))
    return round(1000 * (workflow.at + targets.deadline_s(workflow)))


def slo_fields(sent: SentCall, targets: WorkflowTargets, run: str) -> Mapping[str, Any]:
    """What a client of the gateway says. `run`: in the ids, so that no run joins another's workflows."""
    workflow = sent.workflow
    if workflow.kind == LATENCY:
        return {"slo_class": LATENCY, "target_ttft": targets.ttft_s, "target_tbt": targets.tbt_s}
    if workflow.kind == DEADLINE:
        return {"slo_class": DEADLINE, "deadline": targets.e2e_s}
    return {
        "slo_class": COMPOUND,
        "workflow_deadline": targets.deadline_s(workflow),
        "metadata": {
            "workflow_id": f"{run}-{workflow.number}",
            "stage": PATTERNS[workflow.app][sent.stage].name,
            "step_key": sent.key,
            "parents": sent.parents,
        },
    }


def over_best(row: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, float | None]]:
    """Of each of our contenders, times round robin's and the best priority's `workflow_attainment`; None where those
    did not run or had nothing in time."""
    robin = row["round_robin"]["workflow_attainment"] if "round_robin" in row else 0.0
    best = max((row[name]["workflow_attainment"] for name in PRIORITIES if name in row), default=0.0)
    return {
        name: {
            "over_round_robin": round(of["workflow_attainment"] / robin, 3) if robin else None,
            "over_best_priority": round(of["workflow_attainment"] / best, 3) if best else None,
        }
        for name, of in row.items()
        if name.startswith("slackline")
    }


def in_turn(contenders: Sequence[WorkflowContender], turn: int) -> list[WorkflowContender]:
    """Another one begins each time."""
    first = turn % len(contenders)
    return [*contenders[first:], *contenders[:first]]
