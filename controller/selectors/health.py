"""Whether PostgreSQL is up, migrated, and ready for tomorrow's records."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

from django.db import Error, connection

from controller.selectors.partitions import partitions
from controller.selectors.snapshot import config_version


@dataclass(frozen=True, slots=True)
class DatabaseHealth:
    """`error`: the problem in one line; "": healthy."""

    reachable: bool
    partitions_ok: bool = False
    config_version: int | None = None
    error: str = ""

    @property
    def ok(self) -> bool:
        return self.reachable and self.partitions_ok


def database_health() -> DatabaseHealth:
    """Three queries. Never raises if the database is down, hangs or is not migrated."""
    try:
        with connection.cursor() as cursor:
            cursor.execute("SELECT 1")
        version = config_version()
        today = datetime.now(UTC).date()
        missing = {today, today + timedelta(days=1)} - set(partitions())
    except Error as error:
        return DatabaseHealth(reachable=False, error=str(error).strip().splitlines()[0][:200])
    if missing:
        days = ", ".join(str(day) for day in sorted(missing))
        return DatabaseHealth(True, False, version, f"no partition of request_record for {days}")
    return DatabaseHealth(True, True, version)
