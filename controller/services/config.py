"""The configuration version that gateways poll."""

from __future__ import annotations

from django.db import connection

_RAISE = """
INSERT INTO config_version (id, version, updated_at) VALUES (1, 2, now())
ON CONFLICT (id) DO UPDATE SET version = config_version.version + 1, updated_at = now()
RETURNING version
"""


def config_version_raise() -> int:
    """Raise the configuration version, so that gateways read the configuration again. Call it last in the transaction
    of the change, since the row stays locked until the transaction ends."""
    with connection.cursor() as cursor:
        cursor.execute(_RAISE)
        return int(cursor.fetchone()[0])
