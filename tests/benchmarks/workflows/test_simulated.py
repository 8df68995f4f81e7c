"""Workflows of bench-workflows in the simulator: slackline keeps more of them than what needs nothing of ours."""

from __future__ import annotations

import pytest

from benchmarks.workflows.plan import planned
from benchmarks.workflows.simulated import TARGETS, compare, experiment, over_best, parse, program_of

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


def test_requests_that_can_wait_leave_answers_their_tpot() -> None:
    """Decision 280: latency requests gain, and in all more is in time."""
    seeds = (5300, 5337, 5374, 5411)
    off = {"pacing": {"patience": 1.0, "margin": 1e9}}
    without = compare(experiment(("slackline",), seeds, 40.0, off), 1.3)["slackline"]
    found = compare(experiment(("slackline",), seeds, 40.0, {}), 1.3)["slackline"]
    assert found["by_type"]["latency"] > without["by_type"]["latency"] + 0.05
    assert found["workflow_attainment"] > without["workflow_attainment"]


@pytest.mark.parametrize(
    "words",
    [
        ["--rates", "fast"],
        ["--seeds", "0"],
        ["--targets", "1,2"],
        ["--policies", "best"],
        ["--overrides", '{"pacing": {"hope": 1}}'],
    ],
)
def test_bad_options_are_named(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse(words)
    assert words[0] in capsys.readouterr().err
