"""One deadline for a workflow of several requests: what of it is left for the next one (Concord, sec. 4.1, App. A)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from controller.core.snapshot import Entitlements, TenantConfig
from controller.core.types import Targets
from controller.slo.classes import Applied
from controller.slo.stage_deadlines import LIVE_RULE, stage_due

STEPS_LEFT, STAGES, GRAPH, LAST = "steps_left", "stages", "graph", "last"
LEAST_SHARE_S = 1e-3  # of a step whose due time is over, by rules that keep due times


class WorkflowTime(NamedTuple):
    """`left_s`: until the workflow is due, negative if it is late. `shares`: of the request and of those that follow
    one another from it to the end, relative to each other. `source`: began (this request began it), inherited, or alone
    (what is known of it cannot be read, so the request's own deadline counts from its own arrival). `least_s`: no share
    is shorter. `rule`: what the shares are from: steps_left or stages, as the client said, a graph (`graph_version`,
    with the `similarity` of the workflow to it), or last, since nobody says what follows. `number`: of the request
    among the workflow's, from 1; 0 if not known. `tool_steps`: reported since the request before, as records have
    them. `division`: the tenant's rule of STAGE_DEADLINES, which needs `past`, shares of what came before this request,
    and `whole_s`, the workflow's deadline from its beginning; where that is not known, what is left is divided.
    `first`: no request of the workflow came before that counts as a step."""

    left_s: float
    shares: Sequence[float]
    source: str
    least_s: float = 0.0
    rule: str = LAST
    number: int = 0
    graph_version: int | None = None
    similarity: float = 0.0
    tool_steps: tuple[Mapping[str, Any], ...] = ()
    past: Sequence[float] = ()
    whole_s: float | None = None
    division: str = LIVE_RULE
    first: bool = False

    @property
    def late(self) -> bool:
        return self.left_s <= 0

    @property
    def steps_left(self) -> int:
        """This one included."""
        return len(self.shares)

    @property
    def step_s(self) -> float:
        """What the request gets of the time that is left."""
        if self.whole_s is None or self.division == LIVE_RULE:
            return max(self.least_s, stage_due(LIVE_RULE, self.shares, 0, 0.0, 0.0, self.left_s))
        began = self.whole_s - self.left_s
        due = stage_due(self.division, [*self.past, *self.shares], len(self.past), 0.0, began, self.whole_s)
        return max(self.least_s, LEAST_SHARE_S, due - began)

    def of_tenant(self, tenant: TenantConfig) -> WorkflowTime:
        """Divided by its rule, with the shortest share that it is entitled to: naming many steps, or the last moments
        of a workflow, must not get a request before those of others."""
        return self._replace(least_s=least_share_s(tenant.entitled), division=tenant.stage_deadlines)


def least_share_s(entitled: Entitlements) -> float:
    """The shortest share of a workflow's time that a request of the tenant gets."""
    return max(entitled.tightest_deadline_s or 0.0, entitled.tightest_ttft_s or 0.0)


def within(applied: Applied, time: WorkflowTime, own_waiting: bool) -> Applied:
    """The targets with the workflow's deadline in them. An earlier one of the request or its class stays.

    The share is a guess that steps to come can make up for, so it orders requests and refuses none: the request is
    served late instead, and waits as long as its class says (or itself, with `own_waiting`), at most until the workflow
    is due. If the workflow is late already, the targets stay: the answer may still be of use, though others that can
    be in time go first.
    """
    if time.late:
        return applied
    targets = applied.targets
    deadline = time.step_s if targets.deadline_s is None else min(targets.deadline_s, time.step_s)
    waiting = targets.waiting_time_s if own_waiting else min(targets.waiting_time_s, time.left_s)
    thinking = None if targets.thinking_s is None else min(targets.thinking_s, deadline)
    shared = Targets(min(targets.ttft_s, deadline), targets.tpot_s, deadline, waiting, thinking)
    return replace(applied, targets=shared, may_defer=True)


def rule_of(stages: Sequence[tuple[str, float]], stage: str, steps_left: int | None) -> str:
    """What `shares_from` goes by."""
    if steps_left is not None:
        return STEPS_LEFT
    return STAGES if any(name == stage for name, _ in stages) else LAST


def shares_from(stages: Sequence[tuple[str, float]], stage: str, steps_left: int | None) -> Sequence[float]:
    """The shares of a request of `stage` and of what follows it. `stages`: of the workflow, in order, each with its
    share of the time. `steps_left`: as the request says itself, which comes first. Steps are taken to be equally long
    where nobody says more of them; where nothing is known, the request is the last one."""
    if steps_left is not None:
        return [1.0] * steps_left
    at = next((index for index, (name, _) in enumerate(stages) if name == stage), None)
    return [1.0] if at is None else [share for _, share in stages[at:]]


def past_from(
    stages: Sequence[tuple[str, float]], stage: str, steps_left: int | None, before: int = 0
) -> Sequence[float]:
    """The shares of what came before, relative to `shares_from`. `before`: requests that count
    as steps; they are taken to have followed one another, since nobody says more of them."""
    if steps_left is not None:
        return [float(before)] if before > 0 else []
    at = next((index for index, (name, _) in enumerate(stages) if name == stage), 0)
    return [share for _, share in stages[:at]]
