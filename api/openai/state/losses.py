"""Records that were given up because memory or disk for them was full: counted, never silent."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from datetime import UTC, datetime
from typing import Any, NamedTuple

from controller.core.types import Outcome, StoredRecord, WorkflowCancellation

REFUSED, OTHER = "refused", "other"


def kind_of(record: StoredRecord) -> str:
    """REFUSED without an engine, or OTHER. The former are given up first: they cost nothing and tell less."""
    if isinstance(record, WorkflowCancellation):
        return OTHER
    return REFUSED if record.outcome == Outcome.REFUSED and not record.attempts else OTHER


class Loss(NamedTuple):
    """Records of one kind that are gone. `requests`: that they stood for, a cancellation for one; times of arrival are
    epoch seconds."""

    where: str  # that was full: memory or disk
    kind: str
    requests: int
    first_at: float
    last_at: float


def loss_of(where: str, kind: str, records: Iterable[StoredRecord]) -> Loss:
    gone = [_span(record) for record in records]
    first = min((each[1] for each in gone), default=0.0)
    last = max((each[2] for each in gone), default=0.0)
    return Loss(where, kind, sum(each[0] for each in gone), first, last)


def _span(record: StoredRecord) -> tuple[int, float, float]:
    """How many requests it stood for, and when the first and the last of them arrived."""
    if isinstance(record, WorkflowCancellation):
        return 1, record.cancelled_at, record.cancelled_at
    return record.stands_for, record.arrived_at, record.last_arrived_at or record.arrived_at


class Losses:
    """`total`: requests by (kind, where) since the start. `untold`: what no decision says yet."""

    def __init__(self) -> None:
        self.total: Counter[tuple[str, str]] = Counter()
        self._untold: list[Loss] = []

    def add(self, loss: Loss) -> None:
        if loss.requests:
            self.total[loss.kind, loss.where] += loss.requests
            self._keep(loss)

    def _keep(self, loss: Loss) -> None:
        """One entry for each kind and place, however long nobody can be told."""
        for at, other in enumerate(self._untold):
            if (other.kind, other.where) == (loss.kind, loss.where):
                requests = other.requests + loss.requests
                first, last = min(other.first_at, loss.first_at), max(other.last_at, loss.last_at)
                self._untold[at] = Loss(loss.where, loss.kind, requests, first, last)
                return
        self._untold.append(loss)

    def take(self) -> list[Loss]:
        """What is to be told now; it counts as told unless it is given back."""
        untold, self._untold = self._untold, []
        return untold

    def give_back(self, untold: Iterable[Loss]) -> None:
        for loss in untold:
            self._keep(loss)


def figures(untold: Iterable[Loss]) -> dict[str, Any]:
    """For one decision: how many requests, how many of them refused, and when they arrived (UTC; a span in seconds)."""
    losses = list(untold)
    first, last = min(loss.first_at for loss in losses), max(loss.last_at for loss in losses)
    return {
        "requests": sum(loss.requests for loss in losses),
        "refused_requests": sum(loss.requests for loss in losses if loss.kind == REFUSED),
        "until": f"{datetime.fromtimestamp(last, UTC):%Y-%m-%d %H:%M:%S} UTC",
        "seconds": round(last - first, 1),
    }
