"""The workflows of bench-workflows and what contenders say of them, without a server."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import pytest

from benchmarks.load.lengths import STOP_TOKEN
from benchmarks.workflows.analyser import IDLE_S
from benchmarks.workflows.plan import (
    CAP_TOKENS,
    COMPOUND,
    CONTENDERS,
    DEADLINE,
    LATENCY,
    PATTERNS,
    PlannedCall,
    PlannedWorkflow,
    SentCall,
    WorkflowTargets,
    body_of,
    in_turn,
    over_best,
    planned,
    priority_of,
    slo_fields,
    trace,
)
from workers.analysis import graph_versions

PLAN = planned(10.0, 1, 60.0)
TARGETS = WorkflowTargets(ttft_s=0.5, tbt_s=0.05, e2e_s=3.0)


def workflow(kind: str, at: float = 10.0, stages: int = 1) -> PlannedWorkflow:
    return next(replace(each, at=at) for each in PLAN if each.kind == kind and len(each.stages) >= stages)


def test_the_types_are_one_to_one_to_one() -> None:
    counts = [sum(each.kind == kind for each in PLAN) for kind in (LATENCY, DEADLINE, COMPOUND)]
    assert sum(counts) == len(PLAN)
    assert all(abs(count / len(PLAN) - 1 / 3) < 0.06 for count in counts)


def test_a_seed_gives_the_same_plan_and_another_seed_another() -> None:
    assert planned(10.0, 1, 60.0) == PLAN
    assert planned(10.0, 2, 60.0) != PLAN


def test_what_is_compared_has_other_rows_of_the_trace_than_what_is_learned_from() -> None:
    rows = [(max(1, round(prompt)), max(2, round(answer))) for prompt, answer in trace()]
    half = len(rows) // 2
    for later, own, other in ((False, rows[:half], rows[half:]), (True, rows[half:], rows[:half])):
        singles = [each.stages[0][0] for each in planned(10.0, 3, 30.0, later=later) if each.kind != COMPOUND]
        lengths = [(len(call.prompt), call.output_tokens) for call in singles]
        assert set(lengths) <= set(own)
        assert not set(lengths) <= set(other)


def test_compound_requests_have_the_stages_of_their_application() -> None:
    for each in PLAN:
        if each.kind == COMPOUND:
            shapes = PATTERNS[each.app]
            for shape, stage in zip(shapes, each.stages, strict=True):
                assert shape.calls[0] <= len(stage) <= shape.calls[1]


def test_only_compound_requests_have_several_calls() -> None:
    for each in PLAN:
        calls = sum(len(stage) for stage in each.stages)
        assert (calls > 1) == (each.kind == COMPOUND)
        assert len(each.tools_s) == len(each.stages) - 1


def test_nothing_but_min_tokens_differs_with_the_length_of_an_answer() -> None:
    for each in PLAN:
        sent = SentCall(each, 0, 0, each.at)
        call = sent.call
        assert STOP_TOKEN not in call.prompt
        assert 1 < call.output_tokens < CAP_TOKENS
        short = replace(each, stages=((PlannedCall(call.prompt, 2), *each.stages[0][1:]), *each.stages[1:]))
        of_short = SentCall(short, 0, 0, each.at)
        assert body_of(of_short, "m") == body_of(sent, "m") | {"min_tokens": 1}
        assert slo_fields(of_short, TARGETS, "r") == slo_fields(sent, TARGETS, "r")


def test_no_call_tells_how_many_stages_there_are_but_the_deadline() -> None:
    whole = workflow(COMPOUND, stages=4)
    cut = replace(whole, stages=whole.stages[:2], tools_s=whole.tools_s[:1])
    told = dict(slo_fields(SentCall(whole, 1, 0, 11.0), TARGETS, "r"))
    of_cut = dict(slo_fields(SentCall(cut, 1, 0, 11.0), TARGETS, "r"))
    assert told.pop("workflow_deadline") == TARGETS.e2e_s * len(whole.stages)
    of_cut.pop("workflow_deadline")
    assert told == of_cut


def test_a_call_names_its_workflow_its_key_and_all_parents() -> None:
    each = workflow(COMPOUND, stages=3)
    metadata = slo_fields(SentCall(each, 1, 0, 11.0), TARGETS, "run7")["metadata"]
    assert metadata["workflow_id"] == f"run7-{each.number}"
    assert metadata["step_key"] == "s1-0"
    assert metadata["parents"] == [f"s0-{place}" for place in range(len(each.stages[0]))]
    assert slo_fields(SentCall(each, 0, 0, 10.0), TARGETS, "run7")["metadata"]["parents"] == []


def test_priorities_are_of_the_class_the_call_and_the_workflow() -> None:
    paced, single, compound = workflow(LATENCY), workflow(DEADLINE), workflow(COMPOUND, stages=3)
    later = SentCall(compound, 1, 0, 14.0)
    assert [priority_of("class", SentCall(each, 0, 0, 10.0), TARGETS) for each in (paced, single, compound)] == [
        0,
        1,
        2,
    ]
    assert priority_of("call", SentCall(paced, 0, 0, 10.0), TARGETS) == 10_500
    assert priority_of("call", SentCall(single, 0, 0, 10.0), TARGETS) == 13_000
    assert priority_of("call", later, TARGETS) == 17_000
    assert priority_of("workflow", later, TARGETS) == 10_000 + 3_000 * len(compound.stages)
    assert priority_of("none", later, TARGETS) == 0


def test_a_latency_request_has_no_deadline() -> None:
    assert TARGETS.deadline_s(workflow(LATENCY)) == math.inf
    assert json.dumps(slo_fields(SentCall(workflow(LATENCY), 0, 0, 0.0), TARGETS, "r"))


def test_ours_are_compared_with_round_robin_and_the_best_priority() -> None:
    attained = {"round_robin": 0.4, "engine_priority_class": 0.5, "engine_priority_call": 0.6, "slackline": 0.66}
    found = over_best({name: {"workflow_attainment": of} for name, of in attained.items()})
    assert found == {"slackline": {"over_round_robin": 1.65, "over_best_priority": 1.1}}


def test_there_is_no_ratio_to_a_contender_that_did_not_run():
    found = over_best({"round_robin": {"workflow_attainment": 0.5}, "slackline": {"workflow_attainment": 0.6}})
    assert found == {"slackline": {"over_round_robin": 1.2, "over_best_priority": None}}


def test_each_contender_begins_in_turn() -> None:
    assert [in_turn(CONTENDERS, turn)[0] for turn in range(len(CONTENDERS))] == list(CONTENDERS)
    assert all(sorted(each.name for each in in_turn(CONTENDERS, 3)) == sorted(e.name for e in CONTENDERS) for _ in "a")


def test_graphs_are_made_once_their_workflows_count_as_finished() -> None:
    assert IDLE_S == graph_versions.IDLE_S


@pytest.mark.parametrize("contender", CONTENDERS, ids=lambda each: each.name)
def test_a_contender_is_direct_or_a_gateway(contender: object) -> None:
    direct = {"round_robin", "engine_priority_class", "engine_priority_call", "engine_priority_workflow"}
    assert getattr(contender, "direct") == (getattr(contender, "name") in direct)  # noqa: B009
