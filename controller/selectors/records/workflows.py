"""Workflows as the records of their requests tell them: one result for each, however many requests it had.

What gateways keep of those that are open is added to it (`KeptWorkflow`, as `workers.workflows` reads it)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any, NamedTuple, Protocol

from controller.core.types import Outcome, given_up
from controller.models import RequestRecord

WINDOW = timedelta(hours=1)
MOST_RECORDS = 5_000  # read for one page; the newest
MOST_REQUESTS = 500  # of one workflow; the first
READ = (
    *("id", "arrived_at", "tenant", "workflow", "stage", "step_key", "e2e_s", "outcome", "error_code", "attempts"),
    *("output_tokens", "decisions"),
)
STATES = ("open", "late", "cancelled", "no_deadline")
Name = tuple[str, str]  # tenant, workflow
CANCELLED_BY = {
    "workflow_cancelled": "tenant",
    "workflow_cancelled_by_operator": "operator",
}  # by the decision's reason


class KeptWorkflow(Protocol):
    """What Redis knows of a workflow with a deadline; epoch seconds. `stages`: names with their shares of the time."""

    @property
    def stages(self) -> Sequence[tuple[str, float]]: ...

    @property
    def due_at(self) -> float: ...

    @property
    def began_at(self) -> float | None: ...

    @property
    def deadline_s(self) -> float | None: ...

    @property
    def seen(self) -> int: ...

    @property
    def answered(self) -> int: ...

    @property
    def failed(self) -> int: ...

    @property
    def cancelled_by(self) -> str: ...

    @property
    def cancelled_at(self) -> float | None: ...

    @property
    def tools(self) -> Sequence[tuple[str, str, float, float, Sequence[str] | None]]: ...


@dataclass(slots=True)
class Workflow:
    """`due_at`: None without a deadline. `stages`: as the requests named them, in order, without repetitions. `failed`:
    requests that were refused, cut, cancelled or expired, without steps that their client gave up. `running`: requests
    whose end no gateway has told yet. `cancelled_by`: tenant, operator or "", at `cancelled_at`."""

    tenant: str
    name: str
    began_at: datetime
    ended_at: datetime
    due_at: datetime | None = None
    requests: int = 0
    failed: int = 0
    running: int = 0
    output_tokens: int = 0
    cancelled_by: str = ""
    cancelled_at: datetime | None = None
    stages: list[str] = field(default_factory=list)

    @property
    def late_s(self) -> float | None:
        """By how much its last request ended after the deadline; negative: before it. None without a deadline."""
        return None if self.due_at is None else (self.ended_at - self.due_at).total_seconds()

    @property
    def given_up_by(self) -> str:
        """`cancelled_by`, if that was before it was due: cancelled later, it keeps the result that it had then."""
        late = self.due_at is not None and self.cancelled_at is not None and self.cancelled_at >= self.due_at
        return "" if late else self.cancelled_by

    @property
    def kept(self) -> bool | None:
        """All or nothing: every request that has ended was answered, and the last one by the deadline. None without a
        deadline, or if its client cancelled it before."""
        late_s = self.late_s
        if late_s is None or self.given_up_by == "tenant":
            return None
        return late_s <= 0 and not self.failed and not self.given_up_by

    def missed(self, now: datetime) -> bool:
        """For certain, by now."""
        if self.kept is None or self.due_at is None:
            return False
        return not self.kept or (self.due_at <= now and (self.running > 0 or not self.requests))

    def over(self, now: datetime) -> bool:
        """Its deadline has passed, or it was missed before. False without a result, as without a deadline."""
        return self.kept is not None and self.due_at is not None and (self.due_at <= now or self.missed(now))

    def state(self, now: datetime) -> str:
        """One of `STATES`."""
        if self.cancelled_by:
            return "cancelled"
        return "no_deadline" if self.due_at is None else "late" if self.due_at <= now else "open"

    def left_s(self, now: datetime) -> float | None:
        """Until it is due, negative if it is late. None without a deadline."""
        return None if self.due_at is None else (self.due_at - now).total_seconds()

    @property
    def took_s(self) -> float:
        return (self.ended_at - self.began_at).total_seconds()


class RecentWorkflows(NamedTuple):
    """Newest first. `over`: whose deadline has passed, or that were missed before it; `kept` of them. Each counts once.
    `cut`: more requests than were read, so that the oldest workflows may lack some. `live`: with what gateways keep."""

    workflows: Sequence[Workflow]
    over: int
    kept: int
    cut: bool
    live: bool = False


def recent_workflows(now: datetime, tenant: str | None = None) -> RecentWorkflows:
    """Of the requests that arrived in the last `WINDOW`, of all tenants or of one. One query."""
    recorded = RequestRecord.objects.filter(arrived_at__gte=now - WINDOW)
    rows = list(
        (recorded if tenant is None else recorded.filter(tenant=tenant))
        .exclude(workflow="")
        .order_by("-arrived_at", "-id")
        .only(*READ)[: MOST_RECORDS + 1]
    )
    found: dict[Name, Workflow] = {}
    for row in reversed(rows[:MOST_RECORDS]):
        _add(found, row)
    return _counted(found, now, cut=len(rows) > MOST_RECORDS)


def with_kept(found: RecentWorkflows, kept: Mapping[Name, KeptWorkflow], now: datetime) -> RecentWorkflows:
    """With what gateways keep, also of workflows of which no request has ended."""
    known = {(each.tenant, each.name): each for each in found.workflows}
    for name, told in kept.items():
        began_at = now if told.began_at is None else datetime.fromtimestamp(told.began_at, UTC)
        each = known.get(name)
        if each is None:
            each = known[name] = Workflow(*name, began_at, began_at)
        each.began_at = min(each.began_at, began_at)
        each.due_at = datetime.fromtimestamp(told.due_at, UTC)
        each.running = max(0, told.seen - told.answered - told.failed)
        if told.cancelled_by and told.cancelled_at is not None:
            each.cancelled_by, each.cancelled_at = told.cancelled_by, datetime.fromtimestamp(told.cancelled_at, UTC)
    return _counted(known, now, cut=found.cut, live=True)


def narrowed(found: RecentWorkflows, now: datetime, *, tenant: str = "", state: str = "") -> list[Workflow]:
    """Those of a tenant, in one of `STATES`; "": any."""
    return [each for each in found.workflows if tenant in ("", each.tenant) and (not state or each.state(now) == state)]


class OneWorkflow(NamedTuple):
    """`requests`: those that have ended, in order of arrival, at most `MOST_REQUESTS`; `more`: there are others.
    `kept`: what gateways keep of it, None if they keep nothing or, not `live`, Redis is unavailable."""

    workflow: Workflow
    requests: list[RequestRecord]
    more: bool
    kept: KeptWorkflow | None = None
    live: bool = True


def one_workflow(
    tenant: str, name: str, kept: KeptWorkflow | None, now: datetime, *, live: bool = True
) -> OneWorkflow | None:
    """None if nobody knows of it. Its requests are looked for from when it began, as gateways know it, or within
    `WINDOW`."""
    since = now - WINDOW
    if kept is not None and kept.began_at is not None:
        since = min(since, datetime.fromtimestamp(kept.began_at, UTC) - timedelta(seconds=1))
    rows = list(
        RequestRecord.objects.filter(tenant=tenant, workflow=name, arrived_at__gte=since)
        .order_by("arrived_at", "id")
        .defer("token_times", "length_features")[: MOST_REQUESTS + 1]
    )
    found: dict[Name, Workflow] = {}
    for row in rows[:MOST_REQUESTS]:
        _add(found, row)
    whole = _counted(found, now, cut=False)
    if kept is not None:
        whole = with_kept(whole, {(tenant, name): kept}, now)
    if not whole.workflows:
        return None
    return OneWorkflow(whole.workflows[0], rows[:MOST_REQUESTS], len(rows) > MOST_REQUESTS, kept, live)


def failed(row: RequestRecord) -> bool:
    """It was refused, cut, cancelled or expired, and is no step that its client gave up and can ask for again."""
    return row.outcome != Outcome.OK.value and not given_up(row.step_key, row.error_code)


def tokens_of(row: RequestRecord) -> int:
    """Output tokens that an engine computed for its answer: 0 if it has none, or got that of another request."""
    return row.output_tokens if row.outcome == Outcome.OK.value and row.attempts else 0


def share_of(row: RequestRecord) -> Mapping[str, Any]:
    """What its gateway found of its workflow at its arrival: `left_s`, `steps_left` and, unless it was late, `step_s`;
    empty if the workflow had no deadline."""
    step = next((each for each in row.decisions if each.get("kind") == "workflow"), None)
    found: Mapping[str, Any] = {} if step is None else step.get("figures") or {}
    return found


class ReportedTool(NamedTuple):
    """A step that a client's own tool did. `key`: by which others name it. Epoch seconds."""

    key: str
    name: str
    began: float
    ended: float
    parents: Sequence[str] | None


def tools_of(found: OneWorkflow) -> list[ReportedTool]:
    """As records and gateways have them, by their beginning."""
    told = [ReportedTool(**each) for row in found.requests for each in row.tool_steps]
    kept = [] if found.kept is None else [ReportedTool(*each) for each in found.kept.tools]
    return sorted({each.key: each for each in (*kept, *told)}.values(), key=lambda each: each.began)


def parents_of(rows: Sequence[RequestRecord], tools: Sequence[ReportedTool] = ()) -> dict[str, list[str] | None]:
    """By the id of each step of a workflow, the ids of those that its client said it depends on; None: it did not say.
    A tool's id is its key. Of requests with one step key, the last one before the step counts."""
    steps = [(row.arrived_at.timestamp(), row.id, row.step_key, row.parents) for row in rows]
    steps += [(tool.began, tool.key, "", tool.parents) for tool in tools]
    ids: dict[str, str] = {}
    found: dict[str, list[str] | None] = {}
    for _, name, key, parents in sorted(steps, key=lambda step: step[0]):
        found[name] = None if parents is None else [ids[each] for each in parents if each in ids]
        ids |= {name: name, key or name: name}
    return found


def _counted(found: Mapping[Name, Workflow], now: datetime, *, cut: bool, live: bool = False) -> RecentWorkflows:
    ordered = sorted(found.values(), key=lambda each: (each.began_at, each.tenant, each.name), reverse=True)
    over = [each for each in ordered if each.over(now)]
    return RecentWorkflows(ordered, len(over), sum(not each.missed(now) for each in over), cut, live)


def _add(found: dict[Name, Workflow], row: RequestRecord) -> None:
    ended_at = row.arrived_at + timedelta(seconds=row.e2e_s or 0.0)
    each = found.get((row.tenant, row.workflow))
    if each is None:
        each = found[row.tenant, row.workflow] = Workflow(row.tenant, row.workflow, row.arrived_at, ended_at)
    each.ended_at = max(each.ended_at, ended_at)
    each.requests += 1
    each.failed += failed(row)
    each.output_tokens += tokens_of(row)
    if row.stage and row.stage not in each.stages:
        each.stages.append(row.stage)
    if each.due_at is None:
        each.due_at = _due_at(row)
    last = row.decisions[-1] if row.decisions else {}
    by = CANCELLED_BY.get(str(last.get("reason"))) if last.get("kind") == "cancel" else None
    if by is not None:
        at = row.arrived_at + timedelta(seconds=last.get("at", row.e2e_s or 0.0))
        if each.cancelled_at is None or at < each.cancelled_at:
            each.cancelled_by, each.cancelled_at = by, at


def _due_at(row: RequestRecord) -> datetime | None:
    """When its workflow is due, as its gateway found it."""
    step = next((each for each in row.decisions if each.get("kind") == "workflow"), None)
    if step is None:
        return None
    return row.arrived_at + timedelta(seconds=step.get("at", 0.0) + step["figures"]["left_s"])
