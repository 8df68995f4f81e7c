"""A workflow by its stages: when each was due and when it ended, its tokens beside the predicted ones."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta

from controller.core.types import Outcome, given_up
from controller.models import RequestRecord
from controller.selectors.records.workflows import failed, share_of, tokens_of


@dataclass(slots=True)
class WorkflowStage:
    """Sums over the requests of one stage. `part`: of the workflow's time, as it was declared, 0..1; None if it was
    not. `due_at`: the latest end of a request's share, None without shares. `over_share`: requests that took longer
    than theirs. `given_up`: steps on which their client hung up; nothing else of them counts. `output_tokens`: that
    were computed for answers; `predicted`: the sums of the lower and upper bounds of these, None if one had none."""

    name: str
    part: float | None
    requests: int = 0
    failed: int = 0
    given_up: int = 0
    over_share: int = 0
    output_tokens: int = 0
    ended_at: datetime | None = None
    due_at: datetime | None = None
    predicted: tuple[int, int] | None = (0, 0)

    def add(self, row: RequestRecord) -> None:
        ended_at = row.arrived_at + timedelta(seconds=row.e2e_s or 0.0)
        self.requests += 1
        if given_up(row.step_key, row.error_code):
            self.given_up += 1
            return
        self.ended_at = ended_at if self.ended_at is None else max(self.ended_at, ended_at)
        due_at = due_of(row)
        if due_at is not None:
            self.due_at = due_at if self.due_at is None else max(self.due_at, due_at)
            self.over_share += ended_at > due_at
        self.failed += failed(row)
        if row.outcome != Outcome.OK.value or not row.attempts:
            return
        self.output_tokens += tokens_of(row)
        bounds = predicted_of(row)
        if self.predicted is None or bounds is None:
            self.predicted = None
        else:
            self.predicted = (self.predicted[0] + bounds[0], self.predicted[1] + bounds[1])

    @property
    def slack_s(self) -> float | None:
        """From its end to when it was due, negative if it was late. None without shares."""
        return None if self.due_at is None or self.ended_at is None else (self.due_at - self.ended_at).total_seconds()


def stages_of(rows: Sequence[RequestRecord], parts: Mapping[str, float]) -> list[WorkflowStage]:
    """Of a workflow's requests that have ended: its declared stages in their order, also those without requests, then
    the others in order of arrival. `parts`: of the declared ones. Empty if no stage has a name."""
    found = {name: WorkflowStage(name, part) for name, part in parts.items()}
    for row in rows:
        found.setdefault(row.stage, WorkflowStage(row.stage, None)).add(row)
    return list(found.values()) if any(found) else []


def due_of(row: RequestRecord) -> datetime | None:
    """When a request's share of the time left of its workflow was over. None without a share."""
    share_s = share_of(row).get("step_s")
    return None if share_s is None else row.arrived_at + timedelta(seconds=share_s)


def predicted_of(row: RequestRecord) -> tuple[int, int] | None:
    """Bounds of its answer's tokens, as predicted at its arrival. None without a prediction."""
    bounds = row.length_bounds
    return (bounds[0], bounds[1]) if len(bounds) == 2 else None


def refined_of(row: RequestRecord) -> tuple[int, int, int] | None:
    """Its tokens when its bounds were predicted last while it ran, and these bounds. None if they never were."""
    found = row.refined_bounds
    return None if found is None or len(found) != 3 else (found[0], found[1], found[2])
