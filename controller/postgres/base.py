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

    @property
    def pool(self) -> Any:
        """Django reads the pool's options from the settings and nowhere else: the class must be among them."""
        options = self.settings_dict["OPTIONS"].get("pool")
        if options:
            given = {} if options is True else options
            self.settings_dict["OPTIONS"]["pool"] = {"connection_class": BoundedConnection, **given}
        return super().pool
