"""Request records: written in batches, exactly once, with their roll-ups by minute, the results of their workflows and
their KV transfers.

A batch is copied into a temporary table and inserted from there with ON CONFLICT DO NOTHING, so that a batch whose
acknowledgement was lost can be sent again. Only rows that were inserted count in the roll-up, in the same transaction.
This is plain psycopg, for the writer thread of a gateway, which has its own connection (`records_connection`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

import orjson
import psycopg
from psycopg import sql

from controller.core.types import RECORD_FIELDS, Outcome, RequestRecord, StoredRecord, WorkflowCancellation
from controller.models import RequestRecord as RecordTable
from controller.models import histogram
from controller.postgres.bounded import BoundedConnection
from controller.postgres.params import server_params
from controller.services.records.goodput import goodput_write
from controller.services.records.kv_transfers import kv_transfers_write

_INT_MAX = 2**31 - 1
_TEXT_LENGTHS = {field.attname: field.max_length for field in RecordTable._meta.concrete_fields if field.max_length}
_COLUMNS = sql.SQL(", ").join(map(sql.Identifier, RECORD_FIELDS))
_CREATE = "CREATE TEMPORARY TABLE IF NOT EXISTS incoming (LIKE request_record) ON COMMIT DELETE ROWS"
_COPY = sql.SQL("COPY incoming ({}) FROM STDIN").format(_COLUMNS)
_INSERT = sql.SQL(
    "INSERT INTO request_record ({0}) SELECT {0} FROM incoming ORDER BY arrived_at, id"
    " ON CONFLICT DO NOTHING RETURNING id, arrived_at"
).format(_COLUMNS)

_COUNTS = (
    "finished", "attained", "ttft_met", "tpot_met", "refused", "expired", "failed", "cancelled", "prompt_tokens",
    "output_tokens", "goodput_tokens",
)  # fmt: skip
_HISTOGRAMS = ("ttft_histogram", "tpot_histogram", "e2e_histogram")
_KEY = ("minute", "tenant", "slo_class", "model")
_ADD_ARRAYS = (
    "{0} = (SELECT array_agg(mine + new ORDER BY place) FROM unnest(attainment_minute.{0}, EXCLUDED.{0})"
    " WITH ORDINALITY AS pair(mine, new, place))"
)
_ROLL_UP = sql.SQL(
    "INSERT INTO attainment_minute ({columns}) VALUES ({values}) ON CONFLICT ({key}) DO UPDATE SET {sums}"
).format(
    columns=sql.SQL(", ").join(map(sql.Identifier, (*_KEY, *_COUNTS, *_HISTOGRAMS))),
    values=sql.SQL(", ").join([sql.Placeholder()] * (len(_KEY) + len(_COUNTS) + len(_HISTOGRAMS))),
    key=sql.SQL(", ").join(map(sql.Identifier, _KEY)),
    sums=sql.SQL(", ").join(
        [sql.SQL("{0} = attainment_minute.{0} + EXCLUDED.{0}").format(sql.Identifier(name)) for name in _COUNTS]
        + [sql.SQL(_ADD_ARRAYS).format(sql.Identifier(name)) for name in _HISTOGRAMS]
    ),
)


def records_connection(patience_s: float = 10.0) -> BoundedConnection:
    """A connection for one writer thread. It gives up on a server that hangs for `patience_s`."""
    own = BoundedConnection.connect(**(server_params() | {"application_name": "slackline-records"}))
    own.patience_s = patience_s
    return own


def records_write(*, connection: psycopg.Connection[Any], records: Sequence[StoredRecord]) -> int:
    """Store a batch in one transaction; returns the number of new records of requests. Raises psycopg.Error, and stores
    nothing then.

    Creates missing partitions.
    """
    if not records:
        return 0
    asked = [record for record in records if isinstance(record, RequestRecord)]
    cancelled = [record for record in records if isinstance(record, WorkflowCancellation)]
    with connection.transaction(), connection.cursor() as cursor:
        new = _requests_write(cursor, asked) if asked else []
        goodput_write(cursor, new, cancelled)
        kv_transfers_write(cursor, new)
    return len(new)


def _requests_write(cursor: psycopg.Cursor[Any], records: Sequence[RequestRecord]) -> list[RequestRecord]:
    """Store them and add those that are new, which it returns, to the roll-up by minute."""
    for day in sorted({_at(record.arrived_at).date() for record in records}):
        cursor.execute("SELECT request_record_partition(%s)", [day])
    cursor.execute(_CREATE)
    with cursor.copy(_COPY) as copy:
        for record in records:
            copy.write_row(_row(record))
    cursor.execute(_INSERT)
    new = list(_inserted(records, set(cursor.fetchall())))
    cursor.executemany(_ROLL_UP, [minute.row() for minute in _minutes(new)])
    return new


def _at(epoch_s: float) -> datetime:
    return datetime.fromtimestamp(epoch_s, UTC)


def _row(record: RequestRecord) -> list[Any]:
    """Columns in order. A value that PostgreSQL cannot store is cut to fit, so that it does not fail the whole
    batch."""
    values = {name: getattr(record, name) for name in RECORD_FIELDS}
    values["arrived_at"] = _at(record.arrived_at)
    if record.last_arrived_at is not None:
        values["last_arrived_at"] = _at(record.last_arrived_at)
    for name, length in _TEXT_LENGTHS.items():
        values[name] = _text(values[name])[:length]
    if record.priority is not None:
        values["priority"] = max(-_INT_MAX, min(_INT_MAX, record.priority))
    for name in ("decisions", "token_times", "length_features", "length_bounds", "tool_steps"):
        values[name] = _json(values[name])
    for name in ("parents", "refined_bounds"):
        if values[name] is not None:
            values[name] = _json(values[name])
    return list(values.values())


def _text(raw: str) -> str:
    """The text without NUL and lone surrogates, which PostgreSQL cannot store."""
    return raw.replace("\x00", "").encode("utf-8", "replace").decode()


def _json(value: Any) -> str:
    """JSON with null for NaN, and with texts that PostgreSQL can store."""
    try:
        encoded = orjson.dumps(value)
    except TypeError:  # a lone surrogate
        encoded = b"\\u0000"
    return orjson.dumps(_cleaned(value)).decode() if b"\\u0000" in encoded else encoded.decode()


def _cleaned(value: Any) -> Any:
    if isinstance(value, str):
        return _text(value)
    if isinstance(value, Mapping):
        return {_text(str(key)): _cleaned(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_cleaned(item) for item in value]
    return value


def _inserted(records: Iterable[RequestRecord], keys: set[tuple[str, datetime]]) -> Iterable[RequestRecord]:
    """Each inserted record once, even if the batch has it twice."""
    left = set(keys)
    for record in records:
        key = (record.id, _at(record.arrived_at))
        if key in left:
            left.discard(key)
            yield record


@dataclass(slots=True)
class _Minute:
    """Sums for one row of the roll-up. Requests that were cancelled or rejected by the engine count as cancelled
    only."""

    key: tuple[datetime, str, str, str]
    counts: dict[str, int] = field(default_factory=lambda: dict.fromkeys(_COUNTS, 0))
    histograms: dict[str, list[int]] = field(default_factory=lambda: {name: histogram.empty() for name in _HISTOGRAMS})

    def add(self, record: RequestRecord) -> None:
        if record.counted_as == Outcome.CANCELLED:
            self.counts["cancelled"] += record.stands_for
            return
        for name, amount in _amounts(record).items():
            self.counts[name] += amount
        for name, seconds in zip(_HISTOGRAMS, (record.ttft_s, record.tpot_s, record.e2e_s), strict=True):
            if seconds is not None:
                self.histograms[name][histogram.bucket(seconds)] += 1

    def row(self) -> tuple[Any, ...]:
        return (*self.key, *self.counts.values(), *self.histograms.values())


def _amounts(record: RequestRecord) -> Mapping[str, int]:
    whole = record.all_prompt_tokens
    return {
        "finished": record.stands_for,
        "attained": int(record.attained),
        "ttft_met": int(record.ttft_met),
        "tpot_met": int(record.tpot_met),
        "refused": record.stands_for * (record.outcome == Outcome.REFUSED),
        "expired": int(record.outcome == Outcome.EXPIRED),
        "failed": int(record.outcome in (Outcome.FAILED, Outcome.CUT)),
        "prompt_tokens": record.prompt_tokens if whole is None else whole,
        "output_tokens": record.output_tokens,
        "goodput_tokens": record.goodput_tokens,
    }


def _minutes(records: Iterable[RequestRecord]) -> list[_Minute]:
    """Rows in the order of their keys, so that two writers cannot deadlock."""
    minutes: dict[tuple[datetime, str, str, str], _Minute] = {}
    for record in records:
        minute = _at(record.arrived_at).replace(second=0, microsecond=0)
        key = (minute, record.tenant, record.slo_class, record.model)
        minutes.setdefault(key, _Minute(key)).add(record)
    return [minutes[key] for key in sorted(minutes)]
