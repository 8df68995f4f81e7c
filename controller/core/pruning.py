"""What gateways and the coordinator of pruning tell each other: what waits, and what is served last.

Moments are epoch seconds on the clock that gateways share.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple


class WaitingPrefill(NamedTuple):
    """A request that waits for its prefill and could still be in time.

    `due`: latest end of its prefill. `prefill_s`: seconds of an instance beside other prompts. `slot_tokens`: steps for
    which it holds a sequence slot. `exempt`: an operator forced it. `value`: its worth relative to others.
    """

    id: str
    due: float
    prefill_s: float
    prompt_tokens: int
    slot_tokens: float
    exempt: bool = False
    value: float = 1.0


class PrefillUnit(NamedTuple):
    """One instance as a gateway sees it. Instances that decode elsewhere have a `token_rate` of 0.

    `prefill_rate`: seconds of prefill work it does per second beside its decodes. `backlog_s`: seconds of work that
    this gateway has sent there and that has not ended. `token_rate`: tokens per second of this gateway's slots.
    """

    id: str
    prefill_rate: float
    backlog_s: float
    token_rate: float = 0.0
    free_slots: int = 0


class ModelQueue(NamedTuple):
    """What waits for one model, most urgent first, and the instances that take it."""

    model: str
    waiting: Sequence[WaitingPrefill]
    units: Sequence[PrefillUnit]


class QueueReport(NamedTuple):
    """The queues of one gateway at a moment."""

    gateway: str
    at: float
    queues: Sequence[ModelQueue]


class PruneReason(NamedTuple):
    """Why a request is served last: with it, the last request of its batch would end at `finish`, after `due`."""

    instance: str
    finish: float
    due: float

    @property
    def behind_s(self) -> float:
        return self.finish - self.due


class PruningOrders(NamedTuple):
    """What gateways enforce until `expires_at`. A higher `sequence` replaces a lower one.

    `waiting` and `batches`: how many the coordinator ordered. `gateways`: whose queues it knew.
    """

    sequence: int
    made_at: float
    expires_at: float
    scavengers: Mapping[str, PruneReason]
    waiting: int = 0
    batches: int = 0
    gateways: Sequence[str] = ()


def report_to_json(report: QueueReport) -> list[Any]:
    """Nested lists: rows are many, and names would be most of the message."""
    queues = [[q.model, [[*row] for row in q.waiting], [[*unit] for unit in q.units]] for q in report.queues]
    return [report.gateway, report.at, queues]


def report_from_json(raw: Sequence[Any]) -> QueueReport:
    """Raises TypeError or ValueError for anything but a report."""
    gateway, at, queues = raw
    found = [
        ModelQueue(model, [WaitingPrefill(*row) for row in rows], [PrefillUnit(*unit) for unit in units])
        for model, rows, units in queues
    ]
    return QueueReport(gateway, float(at), found)


def orders_to_json(orders: PruningOrders) -> dict[str, Any]:
    scavengers = {name: [*reason] for name, reason in orders.scavengers.items()}
    return {**orders._asdict(), "scavengers": scavengers}


def orders_from_json(raw: Mapping[str, Any]) -> PruningOrders:
    """Raises KeyError, TypeError or ValueError for anything but orders."""
    scavengers = {name: PruneReason(*reason) for name, reason in raw["scavengers"].items()}
    return PruningOrders(**{**raw, "scavengers": scavengers})
