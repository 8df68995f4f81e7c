"""Workflows as the records of their requests tell them: one result for each, however many requests it had."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import NamedTuple

from controller.core.types import Outcome
from controller.models import RequestRecord

WINDOW = timedelta(hours=1)
MOST_RECORDS = 5_000  # read for one page; the newest
READ = ("id", "arrived_at", "tenant", "workflow", "stage", "e2e_s", "outcome", "decisions")


@dataclass(slots=True)
class Workflow:
    """`due_at`: None without a deadline. `stages`: as the requests named them, in order, without repetitions. `failed`:
    requests that were refused, cut, cancelled or expired."""

    tenant: str
    name: str
    began_at: datetime
    ended_at: datetime
    due_at: datetime | None = None
    requests: int = 0
    failed: int = 0
    stages: list[str] = field(default_factory=list)

    @property
    def late_s(self) -> float | None:
        """By how much its last request ended after the deadline; negative: before it. None without a deadline."""
        return None if self.due_at is None else (self.ended_at - self.due_at).total_seconds()

    @property
    def kept(self) -> bool | None:
        """All or nothing: every request was answered, and the last one by the deadline. None without a deadline."""
        late_s = self.late_s
        return None if late_s is None else late_s <= 0 and not self.failed

    @property
    def took_s(self) -> float:
        return (self.ended_at - self.began_at).total_seconds()


class RecentWorkflows(NamedTuple):
    """`over`: whose deadline has passed, or that failed or were late before it; `kept` of them. Each counts once.
    `cut`: more requests than were read, so that the oldest workflows may lack some."""

    workflows: Sequence[Workflow]
    over: int
    kept: int
    cut: bool


def recent_workflows(now: datetime) -> RecentWorkflows:
    """Of the requests that arrived in the last `WINDOW`, newest workflow first. One query."""
    rows = list(
        RequestRecord.objects.filter(arrived_at__gte=now - WINDOW)
        .exclude(workflow="")
        .order_by("-arrived_at", "-id")
        .only(*READ)[: MOST_RECORDS + 1]
    )
    found: dict[tuple[str, str], Workflow] = {}
    for row in reversed(rows[:MOST_RECORDS]):
        _add(found, row)
    ordered = sorted(found.values(), key=lambda each: each.began_at, reverse=True)
    over = [each for each in ordered if each.due_at is not None and (each.due_at <= now or not each.kept)]
    return RecentWorkflows(ordered, len(over), sum(bool(each.kept) for each in over), len(rows) > MOST_RECORDS)


def _add(found: dict[tuple[str, str], Workflow], row: RequestRecord) -> None:
    ended_at = row.arrived_at + timedelta(seconds=row.e2e_s or 0.0)
    each = found.get((row.tenant, row.workflow))
    if each is None:
        each = found[row.tenant, row.workflow] = Workflow(row.tenant, row.workflow, row.arrived_at, ended_at)
    each.ended_at = max(each.ended_at, ended_at)
    each.requests += 1
    each.failed += row.outcome != Outcome.OK.value
    if row.stage and row.stage not in each.stages:
        each.stages.append(row.stage)
    if each.due_at is None:
        each.due_at = _due_at(row)


def _due_at(row: RequestRecord) -> datetime | None:
    """When its workflow is due, as its gateway found it."""
    step = next((each for each in row.decisions if each.get("kind") == "workflow"), None)
    if step is None:
        return None
    return row.arrived_at + timedelta(seconds=step.get("at", 0.0) + step["figures"]["left_s"])
