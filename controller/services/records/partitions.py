"""Day partitions of records and KV transfers: created in advance, dropped when old. The roll-up is trimmed. UTC."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import UTC, date, datetime, timedelta
from typing import Any

from django.db import connection, transaction
from django.db.models import QuerySet

from controller.models import AttainmentMinute, GoodputMinute, WorkflowResult
from controller.postgres.grants import DROP
from controller.selectors.partitions import TABLES, partitions

DAYS_AHEAD = 7
ROLLUP_CHUNK = timedelta(days=1)  # deleted in one transaction: some 100,000 rows for a hundred groups


def partitions_ensure(*, days: int = DAYS_AHEAD, today: date | None = None) -> list[date]:
    """Create the partitions of today and the next `days` days; returns the days that were new."""
    first = today or datetime.now(UTC).date()
    return partitions_make(days=[first + timedelta(days=ahead) for ahead in range(days + 1)])


def partitions_make(*, days: Iterable[date]) -> list[date]:
    """Create these days' partitions of every table; returns the days that were new for any."""
    made = []
    for day in days:
        with connection.cursor() as cursor:
            cursor.execute("SELECT request_record_partition(%s), kv_transfer_partition(%s)", [day, day])
            if any(cursor.fetchone()):
                made.append(day)
    return made


def records_retain(*, days: int, today: date | None = None) -> list[date]:
    """Drop the partitions of every table that are more than `days` days old; returns the days. The roll-up by minute
    has its own retention."""
    if days < 1:
        raise ValueError("days: at least 1")
    limit = (today or datetime.now(UTC).date()) - timedelta(days=days)
    old = [(table, day) for table in TABLES for day in partitions(table) if day < limit]
    with connection.cursor() as cursor:  # it is there where the worker's database user does not own the tables
        cursor.execute("SELECT to_regprocedure(%s) IS NOT NULL", [DROP])
        by_function = cursor.fetchone()[0]
    for table, day in old:
        with transaction.atomic(), connection.cursor() as cursor:
            cursor.execute(
                "SET LOCAL lock_timeout = '2s'"
            )  # else all queries would wait behind this one; tomorrow it tries again
            if by_function:
                cursor.execute("SELECT record_partition_drop(%s, %s)", [table, day])
            else:
                cursor.execute(f"DROP TABLE {table}_{day:%Y%m%d}")
    return sorted({day for _, day in old})


def rollup_retain(*, days: int, today: date | None = None) -> int:
    """Delete minutes of both roll-ups that are more than `days` days old, one day in a transaction; returns the number
    of rows. Raises ValueError below one day."""
    limit = _limit(days, today)
    return _trimmed(AttainmentMinute.objects.all(), "minute", limit) + _trimmed(
        GoodputMinute.objects.all(), "minute", limit
    )


def workflows_retain(*, days: int, today: date | None = None) -> int:
    """Delete results of workflows that ended more than `days` days ago, one day in a transaction; returns the number of
    rows. Raises ValueError below one day.

    Clients choose the names and each has a row, so they are as many as records rather than as minutes.
    """
    return _trimmed(WorkflowResult.objects.all(), "ends_at", _limit(days, today))


def _limit(days: int, today: date | None) -> datetime:
    """The start of the first day that is kept."""
    if days < 1:
        raise ValueError("days: at least 1")
    first = (today or datetime.now(UTC).date()) - timedelta(days=days)
    return datetime(first.year, first.month, first.day, tzinfo=UTC)


def _trimmed(rows: QuerySet[Any], column: str, limit: datetime) -> int:
    gone = 0
    while (oldest := rows.order_by(column).values_list(column, flat=True).first()) is not None:
        if oldest >= limit:
            break
        until = min(limit, oldest + ROLLUP_CHUNK)
        gone += rows.filter(**{f"{column}__lt": until}).delete()[0]
    return gone
