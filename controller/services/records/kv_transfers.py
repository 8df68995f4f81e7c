"""KV transfers as rows, from the decisions of finished requests and in the transaction that stores their records."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from datetime import UTC, datetime
from typing import Any

import psycopg
from psycopg import sql

from controller.core.types import RequestRecord
from controller.models.links import OUTCOMES, REACHED

COLUMNS = (
    "started_at", "request", "attempt", "model", "source", "target", "outcome", "state", "reason", "error", "bytes",
    "layers", "tokens", "cached", "seconds", "overlap_s", "measured_by", "held_s", "flow",
)  # fmt: skip
ERROR_LENGTH = 1_000
SMALLINT_MAX, INT_MAX, BIGINT_MAX = 2**15 - 1, 2**31 - 1, 2**63 - 1
_COPY = sql.SQL("COPY kv_transfer ({}) FROM STDIN").format(sql.SQL(", ").join(map(sql.Identifier, COLUMNS)))


def kv_transfers_write(cursor: psycopg.Cursor[Any], records: Iterable[RequestRecord]) -> int:
    """Store the KV transfers of newly stored records; returns their number. Creates missing partitions."""
    rows = [row for record in records for row in transfers_of(record)]
    if not rows:
        return 0
    for day in sorted({row[0].date() for row in rows}):
        cursor.execute("SELECT kv_transfer_partition(%s)", [day])
    with cursor.copy(_COPY) as copy:
        for row in rows:
            copy.write_row(row)
    return len(rows)


def transfers_of(record: RequestRecord) -> Iterator[tuple[Any, ...]]:
    """One row for each step of kind `transfer`, columns in order. Incomplete steps are left out."""
    for step in record.decisions:
        figures = step.get("figures")
        if step.get("kind") != "transfer" or not isinstance(figures, Mapping):
            continue
        if figures.get("outcome") not in OUTCOMES or figures.get("state") not in REACHED:
            continue
        seconds = max(0.0, _number(figures.get("seconds")))
        began = record.arrived_at + _number(step.get("at")) - _number(figures.get("after_s"))
        yield (
            datetime.fromtimestamp(began, UTC),
            record.id[:64],
            max(1, _whole(figures.get("attempt"), SMALLINT_MAX) or 1),
            record.model[:120],
            _text(figures.get("source"), 64),
            _text(figures.get("instance"), 64),
            figures["outcome"],
            figures["state"],
            _text(step.get("reason"), 64),
            _text(figures.get("error"), ERROR_LENGTH),
            _whole(figures.get("bytes"), BIGINT_MAX),
            *(_whole(figures.get(name), INT_MAX) for name in ("layers", "tokens", "cached")),
            seconds,
            None if figures.get("overlap_s") is None else _number(figures["overlap_s"]),
            _text(figures.get("measured_by"), 8),
            min(seconds, max(0.0, _number(figures.get("held_s")))),
            _text(figures.get("flow"), 40),
        )


def _number(value: Any) -> float:
    return float(value) if isinstance(value, int | float) and math.isfinite(value) else 0.0


def _whole(value: Any, most: int) -> int | None:
    """A number that an engine counted, limited to what the column holds."""
    return max(0, min(most, int(value))) if isinstance(value, int | float) and math.isfinite(value) else None


def _text(value: Any, length: int) -> str:
    return str(value or "").replace("\x00", "").encode("utf-8", "replace").decode()[:length]
