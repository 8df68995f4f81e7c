"""Django's PostgreSQL backend over BoundedConnection. Settings: ENGINE = "controller.postgres"."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import psycopg
from django.db.backends.postgresql import base

from controller.postgres.bounded import BoundedConnection


class DatabaseWrapper(base.DatabaseWrapper):
    """Only the class of its connections differs, with and without the pool."""

    Database = SimpleNamespace(**{**vars(psycopg), "connect": BoundedConnection.connect})

    def get_connection_params(self) -> dict[str, Any]:
        params = super().get_connection_params()
        if params.get("pool"):
            options = {} if params["pool"] is True else params["pool"]
            params["pool"] = {"connection_class": BoundedConnection, **options}
        return params
