"""What gateways and the coordinator of pruning tell each other: what waits, and what is served last.

Moments are epoch seconds on the clock that gateways share.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
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


class OutgoingKv(NamedTuple):
    """KV of one request that a prefill instance computes or keeps, and that has still to go to a decode instance.

    `due`: latest arrival of the KV. `tokens`: of the prompt. `exempt`, `value`: as in `WaitingPrefill`. `target`: the
    decode instance, "" before it is placed.
    """

    id: str
    due: float
    tokens: int
    exempt: bool = False
    value: float = 1.0
    target: str = ""


class OpenKv(NamedTuple):
    """What a transfer daemon says of the KV of one request. `host`: from which it goes, `to`: the address of the host
    that receives it. `left`: the share of it that is still to be sent.

    `size_bytes`: all of it. `receives`: bytes/s of the port that receives it, as the daemon there was told. Both are 0
    where they are not known.
    """

    host: str
    left: float
    to: str = ""
    size_bytes: float = 0.0
    receives: float = 0.0


class KvPort(NamedTuple):
    """The port through which KV leaves a prefill instance, as one gateway sees it.

    `s_a_token`: seconds of the port for the KV of a token, as this gateway's transfers get it beside those of others.
    `move_s`: seconds between the end of a prefill and its first byte, which `WaitingPrefill.due` has left for them.
    `outgoing`: of requests that this gateway has sent there.
    """

    s_a_token: float
    move_s: float = 0.0
    outgoing: Sequence[OutgoingKv] = ()


class PrefillUnit(NamedTuple):
    """One instance as a gateway sees it. Instances that decode elsewhere have a `token_rate` of 0.

    `prefill_rate`: seconds of prefill work it does per second beside its decodes. `backlog_s`: seconds of work that
    this gateway has sent there and that has not ended. `token_rate`: tokens per second of this gateway's slots.
    `port`: None if its KV stays, or if transfers did not measure the port yet.
    """

    id: str
    prefill_rate: float
    backlog_s: float
    token_rate: float = 0.0
    free_slots: int = 0
    port: KvPort | None = None


class ModelQueue(NamedTuple):
    """What waits for one model, most urgent first, and the instances that take it.

    `inbound`: by decode instance to which KV goes, seconds of the port that receives it for the KV of a token, as this
    gateway's transfers get it beside those of others; 0 where it is not known.
    """

    model: str
    waiting: Sequence[WaitingPrefill]
    units: Sequence[PrefillUnit]
    inbound: Mapping[str, float] = MappingProxyType({})


class QueueReport(NamedTuple):
    """The queues of one gateway at a moment."""

    gateway: str
    at: float
    queues: Sequence[ModelQueue]

    def ids(self) -> Iterator[str]:
        """Of requests that wait for their prefill, and of those whose KV has to leave."""
        for queue in self.queues:
            yield from (row.id for row in queue.waiting)
            for unit in queue.units:
                yield from (row.id for row in unit.port.outgoing) if unit.port else ()

    @property
    def waits(self) -> bool:
        """Whether there are any such requests."""
        return next(self.ids(), None) is not None


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

    `waiting` and `batches`: how many the coordinator ordered. `gateways`: whose queues it knew. `order`: requests that
    are at a prefill instance, those first whose transfers transfer daemons let go first where nothing else decides.
    """

    sequence: int
    made_at: float
    expires_at: float
    scavengers: Mapping[str, PruneReason]
    waiting: int = 0
    batches: int = 0
    gateways: Sequence[str] = ()
    order: Sequence[str] = ()


class OrdersInForce:
    """Which orders count, for one that enforces them. Moments are those of its own clock, in seconds.

    `taken`: how many orders were taken, or not and why: `taken`, `late`, `out_of_sequence`; and how many were in force
    when their time was over, without new ones: `expired`.
    """

    def __init__(self) -> None:
        self.taken: Counter[str] = Counter()
        self.sequence = 0
        self.expires_at = math.inf  # infinite: none are in force

    @property
    def in_force(self) -> bool:
        return not math.isinf(self.expires_at)

    def admit(self, sequence: int, expires_at: float, now: float) -> bool:
        """Whether these count from now on, in place of those before."""
        if expires_at <= now:
            self.taken["late"] += 1
            return False
        if self.in_force and sequence <= self.sequence:
            self.taken["out_of_sequence"] += 1
            return False
        self.taken["taken"] += 1
        self.sequence, self.expires_at = sequence, expires_at
        return True

    def end_if_over(self, now: float) -> bool:
        """Whether those in force ended, since their time is over."""
        if now < self.expires_at:
            return False
        self.taken["expired"] += 1
        self.expires_at = math.inf
        return True


Row = TypeVar("Row", bound="WaitingPrefill | PrefillUnit | OutgoingKv | PruneReason")

# What a value may be, and the least it may be. Whoever has taken a gateway writes to Redis what it likes.
_TEXT = ((str,), None)
_FLAG = ((bool,), None)
_NUMBER = ((float, int), None)
_SIZE = ((float, int), 0)
_COUNT = ((int,), 0)
_WAITING = (_TEXT, _NUMBER, _SIZE, _COUNT, _SIZE, _FLAG, _SIZE)
_UNIT = (_TEXT, _SIZE, _SIZE, _SIZE, _COUNT)
_OUTGOING = (_TEXT, _NUMBER, _COUNT, _FLAG, _SIZE, _TEXT)
_REASON = (_TEXT, _NUMBER, _NUMBER)


def _checked(value: Any, allowed: tuple[tuple[type, ...], int | None]) -> Any:
    types, least = allowed
    if type(value) not in types or (least is not None and value < least):
        raise ValueError(f"{value!r} cannot be")
    return value


def _rows(kind: type[Row], allowed: Sequence[tuple[tuple[type, ...], int | None]], rows: Sequence[Any]) -> list[Row]:
    """All of one kind, field by field, since they are many. What later releases have added at the end is left out."""
    known = [row[: len(allowed)] for row in rows]
    for column, (types, least) in zip(zip(*known, strict=True), allowed, strict=True) if known else ():
        if not set(map(type, column)).issubset(types) or (least is not None and min(column) < least):
            raise ValueError(f"a field of {kind.__name__} cannot be")
    return [kind(*row) for row in known]


def report_to_json(report: QueueReport) -> list[Any]:
    """Nested lists: rows are many, and names would be most of the message."""
    return [report.gateway, report.at, [_queue_to_json(queue) for queue in report.queues]]


def _queue_to_json(queue: ModelQueue) -> list[Any]:
    """`inbound` is left out where there is none, as the port of an instance is."""
    shared = [queue.model, [[*row] for row in queue.waiting], [_unit_to_json(unit) for unit in queue.units]]
    return [*shared, dict(queue.inbound)] if queue.inbound else shared


def _unit_to_json(unit: PrefillUnit) -> list[Any]:
    """A port that is not known is left out: coordinators of before it was added read no longer lists than theirs."""
    *shared, port = unit
    if port is None:
        return shared
    return [*shared, [port.s_a_token, port.move_s, [[*each] for each in port.outgoing]]]


def _units_from_json(raw: Sequence[Any]) -> list[PrefillUnit]:
    units = _rows(PrefillUnit, _UNIT, raw)
    return [unit._replace(port=_port_from_json(each[len(_UNIT) :])) for unit, each in zip(units, raw, strict=True)]


def _port_from_json(raw: Sequence[Any]) -> KvPort | None:
    """From what follows the other fields of its instance."""
    if not raw or raw[0] is None:
        return None
    s_a_token, move_s, outgoing = raw[0][:3]
    outgoing = [row if len(row) >= len(_OUTGOING) else [*row, ""] for row in outgoing]  # of before it had a target
    port = KvPort(_checked(s_a_token, _SIZE), _checked(move_s, _SIZE), _rows(OutgoingKv, _OUTGOING, outgoing))
    return None if port.s_a_token == 0 else port


def report_from_json(raw: Sequence[Any]) -> QueueReport:
    """What later releases have added at the end of a list of fields is left out. Raises TypeError or ValueError for
    anything but a report."""
    gateway, at, queues = raw[:3]
    return QueueReport(_checked(gateway, _TEXT), _checked(at, _NUMBER), [_queue_from_json(queue) for queue in queues])


def _queue_from_json(raw: Sequence[Any]) -> ModelQueue:
    model, rows, units = raw[:3]
    found = ModelQueue(_checked(model, _TEXT), _rows(WaitingPrefill, _WAITING, rows), _units_from_json(units))
    if len(raw) == 3:
        return found
    if not isinstance(raw[3], dict):
        raise TypeError(f"{type(raw[3]).__name__} is not what is received")
    return found._replace(inbound={name: _checked(seconds, _SIZE) for name, seconds in raw[3].items()})


def reasons_to_json(reasons: Mapping[str, PruneReason]) -> dict[str, Any]:
    return {name: [*reason] for name, reason in reasons.items()}


def reasons_from_json(raw: Mapping[str, Any]) -> dict[str, PruneReason]:
    """By request. Raises AttributeError, TypeError or ValueError for anything but reasons."""
    return dict(zip(raw.keys(), _rows(PruneReason, _REASON, list(raw.values())), strict=True))


def orders_to_json(orders: PruningOrders) -> dict[str, Any]:
    return {**orders._asdict(), "scavengers": reasons_to_json(orders.scavengers)}


def orders_from_json(raw: Mapping[str, Any]) -> PruningOrders:
    """Raises AttributeError, KeyError, TypeError or ValueError for anything but orders."""
    return PruningOrders(
        _checked(raw["sequence"], _COUNT),
        _checked(raw["made_at"], _NUMBER),
        _checked(raw["expires_at"], _NUMBER),
        reasons_from_json(raw["scavengers"]),
        _checked(raw["waiting"], _COUNT),
        _checked(raw["batches"], _COUNT),
        _texts(raw["gateways"]),
        _texts(raw.get("order", [])),  # coordinators of an older release send none
    )


def _texts(raw: Any) -> list[str]:
    if not isinstance(raw, list | tuple):
        raise TypeError(f"{type(raw).__name__} is no list")
    return [_checked(name, _TEXT) for name in raw]
