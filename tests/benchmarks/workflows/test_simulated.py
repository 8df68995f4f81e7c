"""Workflows of bench-workflows in the simulator: slackline keeps more of them than what needs nothing of ours."""

from __future__ import annotations

import pytest

from benchmarks.workflows.plan import WorkflowTargets, planned
from benchmarks.workflows.simulated import (
    PROFILE,
    TARGETS,
    compare,
    experiment,
    hindsight,
    over_best,
    parse,
    program_of,
)
from controller.core.types import LatencyCoefficients

TIGHT = WorkflowTargets(0.2818, 0.02558, 4.151)  # with which real servers are overloaded at 2.6 workflows/s
BASELINES = ("round_robin", "engine_priority_deadline")


def test_programs_have_the_lengths_stages_and_deadlines_of_the_plan() -> None:
    for workflow in planned(2.0, 1, 20.0):
        program = program_of(workflow, TARGETS)
        assert (program.at, program.kind, program.tokens) == (workflow.at, workflow.kind, workflow.tokens)
        assert [stage.tool_s for stage in program.stages] == [*workflow.tools_s, 0.0]
        latency = workflow.kind == "latency"
        assert program.targets.deadline_s == (None if latency else TARGETS.e2e_s * len(workflow.stages))
        assert program.targets.tpot_s == (TARGETS.tbt_s if latency else 10.0)


@pytest.mark.parametrize("rate", [1.0, 1.3, 1.7])
def test_slackline_keeps_more_workflows_than_round_robin_and_priorities(rate: float) -> None:
    row = compare(experiment(("slackline", *BASELINES), (5300, 5337, 5374, 5411), 40.0, {}), rate)
    assert (over_best(row) or 0.0) > 1.02, row


# As two vLLM on two shared cores served bench-workflows: each sequence more cost a step three times what the profile
# of one server alone says.
BUSY = dict(zip(PROFILE, (0.03, 7e-4, 3e-7, 0.029, 0.0, 3.8e-3), strict=True))
OF_BUSY = WorkflowTargets(0.6222, 0.04162, 8.206)


def test_tight_requests_do_not_cost_the_workflows_where_each_sequence_makes_steps_much_longer() -> None:
    """Decision 321."""
    believed = {**BUSY, "decode_c": 1.38e-3}
    plan = experiment(("slackline", "round_robin"), (5300, 5337, 5374, 5411), 40.0, {}, OF_BUSY, BUSY, believed)
    row = compare(plan, 0.77)
    assert (over_best(row) or 0.0) > 1.05, row
    assert row["slackline"]["by_type"]["compound"] > row["round_robin"]["by_type"]["compound"] - 0.1, row


def test_requests_that_can_wait_leave_answers_their_tpot() -> None:
    """Decision 280: latency requests gain, and in all more is in time."""
    seeds = (5300, 5337, 5374, 5411)
    off = {"pacing": {"patience": 1.0, "margin": 1e9}}
    without = compare(experiment(("slackline",), seeds, 40.0, off), 1.3)["slackline"]
    found = compare(experiment(("slackline",), seeds, 40.0, {}), 1.3)["slackline"]
    assert found["by_type"]["latency"] > without["by_type"]["latency"] + 0.05
    assert found["workflow_attainment"] > without["workflow_attainment"]


def test_servers_that_share_a_machine_keep_fewer() -> None:
    """Both the time that steps take beside those of the other server and the scatter of their speeds reach them."""
    apart, beside, scattered = (
        compare(experiment(("round_robin",), (5300, 5337), 40.0, {}, beside_s=beside_s, scatter=scatter), 1.0)
        for beside_s, scatter in ((0.0, 0.0), (0.006, 0.0), (0.0, 0.5))
    )
    kept = apart["round_robin"]["workflow_attainment"]
    assert beside["round_robin"]["workflow_attainment"] < kept - 0.1
    assert scattered["round_robin"]["workflow_attainment"] < kept - 0.05


@pytest.mark.simulated
def test_refusing_the_right_workflows_keeps_more() -> None:
    """Of all workflows, the refused ones too."""
    plan = experiment(("slackline",), (5300,), 30.0, {}, TIGHT)
    served, best = compare(plan, 2.6)["slackline"], hindsight(plan, 2.6)
    assert best["workflows"] == served["workflows"]
    assert best["workflow_attainment"] > served["workflow_attainment"] + 0.03


@pytest.mark.simulated
def test_a_step_in_doubt_waits_for_those_that_can_be_in_time() -> None:
    """Decision 304, under overload."""
    seeds = (5300, 5337, 5374, 5411)
    found = {
        doubt: compare(experiment(("slackline",), seeds, 40.0, {"pacing": {"doubt": doubt}}, TIGHT), 2.6)["slackline"]
        for doubt in (0.0, 0.45)
    }
    assert found[0.45]["workflow_attainment"] > found[0.0]["workflow_attainment"] + 0.02


@pytest.mark.parametrize(
    "words",
    [
        ["--rates", "fast"],
        ["--seeds", "0"],
        ["--targets", "1,2"],
        ["--profile", "1,2"],
        ["--believed", "1,2,3,4,5,x"],
        ["--policies", "best"],
        ["--hindsight", "--policies", "round_robin"],
        ["--overrides", '{"pacing": {"hope": 1}}'],
    ],
)
def test_bad_options_are_named(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse(words)
    assert words[0] in capsys.readouterr().err


def test_an_error_tells_slackline_bounds_and_leaves_round_robin_as_it_is() -> None:
    """The dispatcher gets the bounds and their middle, as from an analyser; the workflows are the same."""
    told, learned = (experiment(("slackline", "round_robin"), (5300,), 20.0, {}, error=error) for error in (0.8, None))
    row, other = compare(told, 1.3), compare(learned, 1.3)
    assert row["round_robin"] == other["round_robin"]
    assert row["slackline"]["workflows"] == other["slackline"]["workflows"]
    (first, *_), (known, *_) = (
        plan.workload.programs(1.3, 5300, LatencyCoefficients(**PROFILE)).first() for plan in (told, learned)
    )
    request = first.request("mid", first.targets, 400, None)
    assert first.bounds == (request.least_tokens, request.most_tokens)
    assert (request.least_tokens or 0) < request.output_tokens < (request.most_tokens or 0)
    assert known.bounds is None
    assert known.request("mid", known.targets, 400, None).output_tokens == 400


def test_an_error_must_be_a_number_from_0_on() -> None:
    with pytest.raises(SystemExit):
        parse(["--error", "-1"])
