"""What workflows earn: a compound request counts once, all or nothing."""

from __future__ import annotations

import pytest

from benchmarks.workflows.client import CallTiming, WorkflowRun, WorkflowTiming
from benchmarks.workflows.plan import COMPOUND, DEADLINE, LATENCY, PlannedCall, PlannedWorkflow, WorkflowTargets
from benchmarks.workflows.scoring import goodput_tokens, in_time, light_targets, score, summary

TARGETS = WorkflowTargets(ttft_s=1.0, tbt_s=0.1, e2e_s=2.0)
CALL = PlannedCall((5,) * 7, 3)


def timing(kind: str, *calls: CallTiming, at: float = 0.0, done: bool = True) -> WorkflowTiming:
    stages = max((call.stage for call in calls), default=0) + 1
    planned = tuple(tuple(CALL for call in calls if call.stage == stage) for stage in range(stages))
    return WorkflowTiming(PlannedWorkflow(0, at, kind, "app", planned, (0.0,) * (stages - 1)), list(calls), done)


def call(*events: float, stage: int = 0, due: float = 0.0, outcome: str = "ok") -> CallTiming:
    return CallTiming(stage, len(CALL.prompt), CALL.output_tokens, due, list(events), outcome)


def compound(last: float) -> WorkflowTiming:
    first, side = call(0.5, 0.6, 0.7), call(0.5, 0.6, 0.9)
    return timing(COMPOUND, first, side, call(last - 0.2, last - 0.1, last, stage=1, due=0.9))


def test_a_compound_request_in_time_earns_the_tokens_of_all_its_calls() -> None:
    assert in_time(compound(4.0), TARGETS)
    assert goodput_tokens(compound(4.0), TARGETS) == 3 * 10


def test_a_late_compound_request_earns_nothing_though_its_first_calls_were_fast() -> None:
    assert not in_time(compound(4.01), TARGETS)
    assert goodput_tokens(compound(4.01), TARGETS) == 0


def test_a_compound_request_with_a_lost_call_earns_nothing() -> None:
    lost = timing(COMPOUND, call(0.5, 0.6, 0.7), call(0.8, outcome="refused"), done=False)
    assert not in_time(lost, TARGETS)
    assert goodput_tokens(lost, TARGETS) == 0


def test_a_compound_request_counts_once() -> None:
    found = score(
        WorkflowRun([compound(3.0), compound(9.0), timing(DEADLINE, call(1.9, 1.95, 2.0))], 0.1, 9.0), TARGETS, 10.0
    )
    assert found.by_type == {"deadline": 1.0, "compound": 0.5}
    assert found.workflow_attainment == pytest.approx(2 / 3)
    assert found.goodput_requests_per_s == pytest.approx(0.2)
    assert found.goodput_tokens_per_s == pytest.approx(4.0)
    assert (found.workflows, found.calls) == (3, {"ok": 7})


def test_a_deadline_request_earns_prompt_and_answer_or_nothing() -> None:
    assert goodput_tokens(timing(DEADLINE, call(1.8, 1.9, 2.0)), TARGETS) == 10
    assert goodput_tokens(timing(DEADLINE, call(1.8, 1.9, 2.01)), TARGETS) == 0


def test_a_latency_request_earns_the_tokens_on_its_timeline() -> None:
    late_in_the_middle = timing(LATENCY, call(0.9, 1.15, 1.16))
    assert goodput_tokens(late_in_the_middle, TARGETS) == 2
    assert not in_time(late_in_the_middle, TARGETS)  # a mean of 0.13 s
    assert in_time(timing(LATENCY, call(1.0, 1.15, 1.2)), TARGETS)  # by its mean pace, though not each token was
    assert not in_time(timing(LATENCY, call(1.01, 1.02, 1.03)), TARGETS)


def test_a_cut_latency_request_is_a_miss_whose_tokens_count() -> None:
    cut = timing(LATENCY, call(0.5, 0.6, outcome="cut"), done=False)
    assert not in_time(cut, TARGETS)
    assert goodput_tokens(cut, TARGETS) == 2


def test_tokens_that_came_together_count_at_the_last_event() -> None:
    assert goodput_tokens(timing(LATENCY, call(0.5, 0.6)), TARGETS) == 3
    assert goodput_tokens(timing(LATENCY, call(0.5, 1.3)), TARGETS) == 1


def test_targets_are_the_95_percent_points_of_a_light_run() -> None:
    paced = [timing(LATENCY, call(n / 100, n / 100 + 0.01 * n, n / 100 + 0.02 * n)) for n in range(1, 101)]
    whole = [timing(DEADLINE, call(0.1, 0.2, n / 10)) for n in range(1, 101)]
    found = light_targets(WorkflowRun([*paced, *whole], 0.0, 1.0))
    assert (found.ttft_s, found.tbt_s, found.e2e_s) == (0.95, 0.95, 9.5)
    assert light_targets(WorkflowRun([*paced, *whole], 0.0, 1.0), 2.0).e2e_s == 19.0


def test_a_light_run_with_unanswered_calls_gives_no_targets() -> None:
    with pytest.raises(RuntimeError, match="unanswered"):
        light_targets(WorkflowRun([timing(DEADLINE, call(outcome="cut"), done=False)], 0.0, 1.0))
    with pytest.raises(RuntimeError, match="lacks"):
        light_targets(WorkflowRun([timing(DEADLINE, call(0.1, 0.2, 0.3))], 0.0, 1.0))


def test_latency_requests_are_counted_by_what_was_late() -> None:
    late = [timing(LATENCY, call(1.1, 1.15, 1.2)), timing(LATENCY, call(0.5, 0.7, 0.9)), timing(LATENCY, call(2, 3, 4))]
    lost = timing(LATENCY, call(0.5, outcome="cut"), done=False)
    good = [timing(LATENCY, call(0.5, 0.55, 0.6)), timing(DEADLINE, call(5.0, 6.0, 7.0))]
    found = score(WorkflowRun([*late, lost, *good], 0.1, 9.0), TARGETS, 10.0)
    assert found.latency_missed == {"ttft": 2, "tbt": 2, "unanswered": 1}
    assert summary([found, found])["latency_missed"] == {"ttft": 4, "tbt": 4, "unanswered": 2}


def test_medians_over_seeds_and_their_spread() -> None:
    runs = [WorkflowRun([compound(3.0)] * n + [compound(9.0)] * (4 - n), 0.1 * n, 9.0) for n in (1, 2, 4)]
    found = summary([score(run, TARGETS, 10.0) for run in runs])
    assert (found["workflow_attainment"], found["workflow_attainment_spread"]) == (0.5, [0.25, 1.0])
    assert (found["by_type"], found["runs"], found["workflows"]) == ({"compound": 0.5}, 3, 12)
    assert found["largest_gap_s"] == 0.4


def test_no_workflows_have_no_score() -> None:
    with pytest.raises(ValueError, match="without workflows"):
        score(WorkflowRun([], 0.0, 0.0), TARGETS, 1.0)
