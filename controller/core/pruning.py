"""What gateways and the coordinator of pruning tell each other: what waits, and what is served last.

Moments are epoch seconds on the clock that gateways share.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, TypeVar


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


Row = TypeVar("Row", bound="WaitingPrefill | PrefillUnit | PruneReason")

_NUMBER = (float, int)
_WAITING = ((str,), _NUMBER, _NUMBER, (int,), _NUMBER, (bool,), _NUMBER)
_UNIT = ((str,), _NUMBER, _NUMBER, _NUMBER, (int,))
_REASON = ((str,), _NUMBER, _NUMBER)


def _row(kind: type[Row], types: Sequence[tuple[type, ...]], values: Any) -> Row:
    """Whoever has taken a gateway writes to Redis what it likes. Raises TypeError or ValueError for another type, or a
    negative number where there can be none."""
    row = kind(*values)
    if not all(type(value) in allowed for value, allowed in zip(row, types, strict=True)):
        raise TypeError(f"not a {kind.__name__}")
    if isinstance(row, WaitingPrefill):
        right = min(row.prefill_s, row.prompt_tokens, row.slot_tokens) >= 0 and row.value > 0
    elif isinstance(row, PrefillUnit):
        right = row.prefill_rate > 0 and min(row.backlog_s, row.token_rate, row.free_slots) >= 0
    else:
        right = True
    if not right:
        raise ValueError(f"a {kind.__name__} has figures that cannot be")
    return row


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError("not a text")
    return value


def _seconds(value: Any) -> float:
    if type(value) not in _NUMBER:
        raise TypeError("not a number of seconds")
    return float(value)


def _count(value: Any) -> int:
    if type(value) is not int or value < 0:
        raise ValueError("not a count")
    return value


def report_to_json(report: QueueReport) -> list[Any]:
    """Nested lists: rows are many, and names would be most of the message."""
    queues = [[q.model, [[*row] for row in q.waiting], [[*unit] for unit in q.units]] for q in report.queues]
    return [report.gateway, report.at, queues]


def report_from_json(raw: Sequence[Any]) -> QueueReport:
    """Raises TypeError or ValueError for anything but a report."""
    gateway, at, queues = raw
    found = [
        ModelQueue(
            _text(model),
            [_row(WaitingPrefill, _WAITING, row) for row in rows],
            [_row(PrefillUnit, _UNIT, unit) for unit in units],
        )
        for model, rows, units in queues
    ]
    return QueueReport(_text(gateway), _seconds(at), found)


def orders_to_json(orders: PruningOrders) -> dict[str, Any]:
    scavengers = {name: [*reason] for name, reason in orders.scavengers.items()}
    return {**orders._asdict(), "scavengers": scavengers}


def orders_from_json(raw: Mapping[str, Any]) -> PruningOrders:
    """Raises AttributeError, KeyError, TypeError or ValueError for anything but orders."""
    return PruningOrders(
        _count(raw["sequence"]),
        _seconds(raw["made_at"]),
        _seconds(raw["expires_at"]),
        {_text(name): _row(PruneReason, _REASON, reason) for name, reason in raw["scavengers"].items()},
        _count(raw["waiting"]),
        _count(raw["batches"]),
        [_text(name) for name in raw["gateways"]],
    )
