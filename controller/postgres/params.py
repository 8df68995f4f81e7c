"""What a connection beside Django's own must say, so that everything in DATABASE_URL holds for it too."""

from __future__ import annotations

from typing import Any

from psycopg import pq

NO_TIMEOUT = "-c statement_timeout=0"  # console and gateway set one for their own calls: the last one said holds


def libpq_options() -> frozenset[str]:
    """Names of all connection parameters that the client library knows."""
    return frozenset(option.keyword.decode() for option in pq.Conninfo.get_defaults())


def server_params() -> dict[str, Any]:
    """The settings' address, person, TLS and server options. Nothing of Django's cursors, and no pool."""
    from django.db import connection  # settings name this package before there is a database

    known = libpq_options()
    params = {name: value for name, value in connection.get_connection_params().items() if name in known}
    return params | {"options": f"{params.get('options', '')} {NO_TIMEOUT}".strip()}
