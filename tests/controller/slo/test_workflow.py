"""Targets of a request within its workflow's deadline."""

from __future__ import annotations

from controller.core.types import Targets
from controller.slo.classes import Applied
from controller.slo.workflow import WorkflowTime, within


def test_a_thinking_deadline_is_no_later_than_the_share_of_its_workflow():
    applied = Applied(Targets(5.0, 0.1, None, 20.0, 10.0), "chat", None, 1.0, "class")
    found = within(applied, WorkflowTime(8.0, (1.0, 1.0), "began"), own_waiting=False).targets
    assert (found.deadline_s, found.thinking_s, found.ttft_s) == (4.0, 4.0, 4.0)
    assert within(applied, WorkflowTime(40.0, (1.0, 1.0), "began"), own_waiting=False).targets.thinking_s == 10.0
