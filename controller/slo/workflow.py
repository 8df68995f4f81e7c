"""One deadline for a workflow of several requests: what of it is left for the next one (Concord, sec. 4.1, App. A)."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from controller.core.snapshot import Entitlements
from controller.core.types import Targets
from controller.slo.classes import Applied
from controller.slo.stage_deadlines import stage_due

RULE = "share_of_rest"  # a step that ends early or late leaves more or less to all that follow it


class WorkflowTime(NamedTuple):
    """`left_s`: until the workflow is due, negative if it is late. `steps_left`: requests that follow one another from
    here to its end, this one included. `source`: began (this request began it), inherited, or alone (what is known of
    it cannot be read, so the request's own deadline counts from its own arrival). `least_s`: no share is shorter."""

    left_s: float
    steps_left: int
    source: str
    least_s: float = 0.0

    @property
    def late(self) -> bool:
        return self.left_s <= 0

    @property
    def step_s(self) -> float:
        """What the request gets of the time that is left. Steps to come are taken to be equally long, since nobody
        knows more of them yet."""
        return max(self.least_s, stage_due(RULE, [1.0] * self.steps_left, 0, 0.0, 0.0, self.left_s))

    def entitled(self, entitled: Entitlements) -> WorkflowTime:
        """With the shortest share that the tenant is entitled to: naming many steps, or the last moments of a workflow,
        must not get a request before those of others."""
        return self._replace(least_s=max(entitled.tightest_deadline_s or 0.0, entitled.tightest_ttft_s or 0.0))


def within(applied: Applied, time: WorkflowTime, own_waiting: bool) -> Applied:
    """The targets with the workflow's deadline in them. An earlier one of the request or its class stays.

    The share is a guess that steps to come can make up for, so it orders requests and refuses none: the request is
    served late instead, and waits as long as its class says (or itself, with `own_waiting`), at most until the workflow
    is due. If the workflow is late already, nothing changes: the answer may still be of use.
    """
    if time.late:
        return applied
    targets = applied.targets
    deadline = time.step_s if targets.deadline_s is None else min(targets.deadline_s, time.step_s)
    waiting = targets.waiting_time_s if own_waiting else min(targets.waiting_time_s, time.left_s)
    shared = Targets(min(targets.ttft_s, deadline), targets.tpot_s, deadline, waiting)
    return replace(applied, targets=shared, may_defer=True)
