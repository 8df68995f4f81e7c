"""Which days have a partition of the request records."""

from __future__ import annotations

import re
from datetime import date, datetime

from django.db import connection

_NAME = re.compile(r"request_record_(\d{8})")
_LIST = """
SELECT child.relname FROM pg_inherits
JOIN pg_class child ON child.oid = inhrelid
JOIN pg_class parent ON parent.oid = inhparent
WHERE parent.relname = 'request_record' ORDER BY 1
"""


def partitions() -> list[date]:
    """In order."""
    with connection.cursor() as cursor:
        cursor.execute(_LIST)
        names = [row[0] for row in cursor.fetchall()]
    return [datetime.strptime(match[1], "%Y%m%d").date() for name in names if (match := _NAME.fullmatch(name))]
