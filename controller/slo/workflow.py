"""One deadline for a workflow of several requests: what of it is left for the next one (Concord, sec. 4.1, App. A)."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from controller.slo.classes import SloFields
from controller.slo.stage_deadlines import stage_due

RULE = "share_of_rest"  # a step that ends early or late leaves more or less to all that follow it


class WorkflowTime(NamedTuple):
    """`left_s`: until the workflow is due, negative if it is late. `steps_left`: requests that follow one another from
    here to its end, this one included. `source`: began (this request began it), inherited, or alone (what is known of
    it cannot be read, so the request's own deadline counts from its own arrival)."""

    left_s: float
    steps_left: int
    source: str

    @property
    def late(self) -> bool:
        return self.left_s <= 0

    @property
    def step_s(self) -> float:
        """What the request gets of the time that is left. Steps to come are taken to be equally long, since nobody
        knows more of them yet."""
        return stage_due(RULE, [1.0] * self.steps_left, 0, 0.0, 0.0, self.left_s)


def within(asked: SloFields, time: WorkflowTime) -> SloFields:
    """The request's fields with the workflow's deadline in them. A deadline of its own that is earlier stays, and so
    does what it asked for if the workflow is late already: its answer may still be of use."""
    if time.late:
        return asked
    deadline = time.step_s if asked.deadline is None else min(asked.deadline, time.step_s)
    ttft = asked.target_ttft
    return replace(asked, deadline=deadline, target_ttft=None if ttft is None else min(ttft, deadline))
