"""The days that have a partition of a table that is partitioned by day."""

from __future__ import annotations

from datetime import date, datetime

from django.db import connection

RECORDS, TRANSFERS = "request_record", "kv_transfer"
TABLES = (RECORDS, TRANSFERS)
_LIST = """
SELECT child.relname FROM pg_inherits
JOIN pg_class child ON child.oid = inhrelid
JOIN pg_class parent ON parent.oid = inhparent
WHERE parent.relname = %s ORDER BY 1
"""


def partitions(table: str = RECORDS) -> list[date]:
    """The days in order."""
    with connection.cursor() as cursor:
        cursor.execute(_LIST, [table])
        names = [row[0].removeprefix(f"{table}_") for row in cursor.fetchall()]
    return [datetime.strptime(name, "%Y%m%d").date() for name in names if len(name) == 8 and name.isdigit()]
