"""Django's PostgreSQL backend over BoundedConnection. Settings: ENGINE = "controller.postgres".

With a pool (the console) a circuit stands before it: while PostgreSQL is unavailable, only the first page waits to
find out.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, ClassVar

import psycopg
from django.db.backends.postgresql import base

from controller.postgres.bounded import BoundedConnection
from controller.postgres.circuit import Circuit


class DatabaseWrapper(base.DatabaseWrapper):
    """The class of its connections differs, with and without the pool; and the pool is behind a circuit."""

    # Django takes a module's place for granted here, and reads names from it alone
    Database = SimpleNamespace(**{**vars(psycopg), "connect": BoundedConnection.connect})  # type: ignore[assignment]
    _circuits: ClassVar[dict[str, Circuit]] = {}  # one a process and alias, as Django's pools

    @property
    def pool(self) -> Any:
        """Django reads the pool's options from the settings and nowhere else: the class must be among them."""
        options = self.settings_dict["OPTIONS"].get("pool")
        if options:
            given = {} if options is True else options
            self.settings_dict["OPTIONS"]["pool"] = {"connection_class": BoundedConnection, **given}
        return super().pool

    def get_new_connection(self, conn_params: dict[str, Any]) -> Any:
        if not self.pool:
            return super().get_new_connection(conn_params)
        circuit = self._circuit(conn_params)
        circuit.check()
        try:
            return super().get_new_connection(conn_params)
        except psycopg.OperationalError:
            circuit.failed()
            raise

    def _circuit(self, conn_params: dict[str, Any]) -> Circuit:
        alias, params = self.alias, dict(conn_params)

        def probe() -> None:
            BoundedConnection.connect(**params).close()

        def restored() -> None:
            """The old pool tries again ever more seldom: a new one is there at once."""
            pool = base.DatabaseWrapper._connection_pools.pop(alias, None)  # type: ignore[attr-defined]
            if pool is not None:
                pool.close(timeout=0)

        return self._circuits.setdefault(alias, Circuit(probe, restored))
