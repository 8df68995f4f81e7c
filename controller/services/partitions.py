"""Day partitions of records and KV transfers: made ahead, dropped when old; the roll-up trimmed. Days are UTC."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import UTC, date, datetime, timedelta

from django.db import connection, transaction

from controller.models import AttainmentMinute
from controller.selectors.partitions import TABLES, partitions

DAYS_AHEAD = 7
ROLLUP_CHUNK = timedelta(days=1)  # minutes deleted at once: some 100,000 rows of a hundred groups


def partitions_ensure(*, days: int = DAYS_AHEAD, today: date | None = None) -> list[date]:
    """Make the partitions of today and the next `days` days; returns those that were new."""
    first = today or datetime.now(UTC).date()
    return partitions_make(days=[first + timedelta(days=ahead) for ahead in range(days + 1)])


def partitions_make(*, days: Iterable[date]) -> list[date]:
    """Of every table; returns the days that were new for any."""
    made = []
    for day in days:
        with connection.cursor() as cursor:
            cursor.execute("SELECT request_record_partition(%s), kv_transfer_partition(%s)", [day, day])
            if any(cursor.fetchone()):
                made.append(day)
    return made


def records_retain(*, days: int, today: date | None = None) -> list[date]:
    """Drop the partitions of days more than `days` days ago, of every table; returns the days. The minute roll-up has
    its own term."""
    if days < 1:
        raise ValueError("days: at least 1")
    limit = (today or datetime.now(UTC).date()) - timedelta(days=days)
    old = [(table, day) for table in TABLES for day in partitions(table) if day < limit]
    for table, day in old:
        with transaction.atomic(), connection.cursor() as cursor:
            cursor.execute("SET LOCAL lock_timeout = '2s'")  # rather tomorrow than all queries waiting behind this one
            cursor.execute(f"DROP TABLE {table}_{day:%Y%m%d}")
    return sorted({day for _, day in old})


def rollup_retain(*, days: int, today: date | None = None) -> int:
    """Delete the minutes of days more than `days` days ago, a day a transaction; returns how many rows went."""
    if days < 1:
        raise ValueError("days: at least 1")
    first = (today or datetime.now(UTC).date()) - timedelta(days=days)
    limit = datetime(first.year, first.month, first.day, tzinfo=UTC)
    gone = 0
    while (oldest := AttainmentMinute.objects.order_by("minute").values_list("minute", flat=True).first()) is not None:
        if oldest >= limit:
            break
        until = min(limit, oldest + ROLLUP_CHUNK)
        gone += AttainmentMinute.objects.filter(minute__lt=until).delete()[0]
    return gone
