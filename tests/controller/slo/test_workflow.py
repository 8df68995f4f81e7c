"""Targets of a request within its workflow's deadline."""

from __future__ import annotations

import pytest

from controller.core.snapshot import TenantConfig
from controller.core.types import Targets
from controller.slo.classes import Applied
from controller.slo.workflow import LEAST_SHARE_S, WorkflowTime, past_from, shares_from, within

STAGES = (("plan", 2.0), ("search", 3.0), ("write", 5.0))


def divided(rule: str, stage: str, began_s: float, whole_s: float | None = 20.0) -> float:
    """What a request of `stage` gets that begins at `began_s`, of a workflow of 20 s (worked example C6)."""
    told = (STAGES, stage, None)
    time = WorkflowTime(20.0 - began_s, shares_from(*told), "inherited", past=past_from(*told), whole_s=whole_s)
    return time.of_tenant(TenantConfig(1, "acme", None, stage_deadlines=rule)).step_s


@pytest.mark.parametrize(
    ("rule", "second", "third"), [("share_of_rest", 5.25, 8.0), ("accumulated", 4.0, 8.0), ("own_share", 6.0, 8.0)]
)
def test_a_late_stage_leaves_to_the_next_what_the_rule_of_its_tenant_says(rule, second, third):
    assert divided(rule, "plan", 0.0) == pytest.approx(4.0)
    assert divided(rule, "search", 6.0) == pytest.approx(second)
    assert divided(rule, "write", 12.0) == pytest.approx(third), "the rest, whatever the rule"
    assert divided(rule, "search", 6.0, None) == pytest.approx(5.25), "nobody knows when it began"


def test_a_stage_whose_due_time_is_over_gets_the_least_share():
    assert divided("accumulated", "search", 11.0) == LEAST_SHARE_S
    assert divided("own_share", "search", 19.0) == pytest.approx(1.0), "no later than the workflow is due"


def test_steps_left_count_those_before_as_alike():
    assert (past_from((), "", 2, 3), past_from((), "", 2, 0), past_from(STAGES, "other", None)) == ([3.0], [], [])


def test_a_thinking_deadline_is_no_later_than_the_share_of_its_workflow():
    applied = Applied(Targets(5.0, 0.1, None, 20.0, 10.0), "chat", None, 1.0, "class")
    found = within(applied, WorkflowTime(8.0, (1.0, 1.0), "began"), own_waiting=False).targets
    assert (found.deadline_s, found.thinking_s, found.ttft_s) == (4.0, 4.0, 4.0)
    assert within(applied, WorkflowTime(40.0, (1.0, 1.0), "began"), own_waiting=False).targets.thinking_s == 10.0
