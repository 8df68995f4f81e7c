"""Fills a database as long use would: records, their roll-up, decisions, a fleet. The SQL is beside this file."""

from __future__ import annotations

from pathlib import Path

from django.db import connection

SQL = Path(__file__).with_suffix(".sql")


def fill(records: int, decisions: int, instances: int, hours: float = 24.0) -> None:
    """Into an empty, migrated database. The records lie in the last `hours`, the decisions in the last thirty days."""
    counts = {"records": records, "decisions": decisions, "instances": instances, "hours": hours}
    with connection.cursor() as cursor:
        cursor.execute("SET statement_timeout = 0")
        cursor.execute(SQL.read_text(encoding="utf-8"), counts)
        cursor.execute("VACUUM (ANALYZE)")  # as autovacuum does in time
