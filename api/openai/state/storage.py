"""The gateway's only access to PostgreSQL: it reads configuration and writes records. Blocking: call off the loop.

Only this module and __main__ import Django.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import psycopg

from api.openai.state.recorder import Unstorable
from controller.core.decisions import DecisionMessage
from controller.core.snapshot import GatewaySnapshot
from controller.core.types import StoredRecord
from controller.predict.answer_lengths import PublishedVersion, VersionOutcome

PATIENCE_S = 6.0  # less than the recorder's own limit, so that a hanging server ends as an error


class Database:
    """One object, used from the threads of recorder and snapshot source."""

    def __init__(self) -> None:
        self._connection: psycopg.Connection[Any] | None = None

    def write(self, records: Sequence[StoredRecord]) -> int:
        """Write records; stored ids are ignored. Raises Unstorable, or psycopg.Error, after which it reconnects."""
        from controller.services.records.requests import records_connection, records_write

        if self._connection is None or self._connection.closed:
            self._connection = records_connection(PATIENCE_S)
        try:
            return records_write(connection=self._connection, records=records)
        except (psycopg.DataError, psycopg.IntegrityError) as error:
            raise Unstorable(str(error)) from error
        except psycopg.Error:
            self._connection.close()
            raise

    def version(self) -> int:
        """The configuration's version: one row, read twice a second."""
        from django.db import close_old_connections

        from controller.selectors.snapshot import config_version

        close_old_connections()
        return config_version()

    def snapshot(self) -> GatewaySnapshot:
        from controller.selectors.snapshot import gateway_snapshot

        return gateway_snapshot()

    def length_versions(self) -> Sequence[PublishedVersion]:
        """The newest published length forest of each model."""
        from django.db import close_old_connections

        from controller.selectors.records.length_versions import published_versions

        close_old_connections()
        return published_versions()

    def length_content(self, model: str, version: int) -> bytes | None:
        from controller.selectors.records.length_versions import published_content

        return published_content(model, version)

    def graph_versions(self) -> Sequence[PublishedVersion]:
        """The newest published pattern graphs of each tenant."""
        from django.db import close_old_connections

        from controller.selectors.records.graph_versions import published_graphs

        close_old_connections()
        return published_graphs()

    def graph_content(self, tenant: str, version: int) -> bytes | None:
        from controller.selectors.records.graph_versions import published_graph_content

        return published_graph_content(tenant, version)

    def version_outcomes(self, gateway: str, what: str, outcomes: Sequence[VersionOutcome]) -> None:
        """Store what became of published versions. `what`: LENGTHS or GRAPHS."""
        from django.db import close_old_connections

        from controller.services.records.takeovers import takeovers_write

        close_old_connections()
        takeovers_write(gateway=gateway, what=what, outcomes=outcomes)

    def refusals(self, gateway: str, figures: Mapping[str, Any]) -> DecisionMessage:
        """Record a batch of refusals as one decision; returns its message for live pages."""
        return self._decided(gateway, "refusals", str(figures["commonest"]), figures)

    def records_lost(self, gateway: str, figures: Mapping[str, Any]) -> DecisionMessage:
        """Record that records were given up; returns its message for live pages."""
        return self._decided(gateway, "records_lost", "no_room_for_records", figures)

    def _decided(self, gateway: str, kind: str, reason: str, figures: Mapping[str, Any]) -> DecisionMessage:
        from django.db import close_old_connections

        from controller.services.actors import Actor
        from controller.services.decisions import decision_record
        from controller.wording.sentences import message_of

        close_old_connections()
        decision = decision_record(
            actor=Actor.gateway(gateway),
            kind=kind,
            subject_type="gateway",
            subject=gateway,
            reason=reason,
            inputs=figures,
        )
        return message_of(decision)

    def keys_used(self, key_ids: Iterable[int]) -> None:
        """Record that these keys were used now."""
        from django.db import close_old_connections
        from django.utils import timezone

        from controller.services.slo.api_keys import api_keys_used

        close_old_connections()
        api_keys_used(key_ids=key_ids, at=timezone.now())
