"""The store of a gateway that runs alone: configuration from a JSON file; records stay in the spool."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import orjson

from controller.core.decisions import DecisionMessage
from controller.core.errors import SlacklineError
from controller.core.snapshot import GatewaySnapshot, snapshot_from_json
from controller.core.types import StoredRecord
from controller.predict.answer_lengths import PublishedVersion, VersionOutcome


class NoDatabase(SlacklineError):
    """There is no database to write to; records stay in the spool."""


class FileStore:
    """The file is read again when it changes; its modification time is the version."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def version(self) -> int:
        return self._path.stat().st_mtime_ns

    def snapshot(self) -> GatewaySnapshot:
        raw = orjson.loads(self._path.read_bytes())
        return snapshot_from_json(raw | {"version": self.version()})

    def write(self, records: Sequence[StoredRecord]) -> int:
        raise NoDatabase("a gateway that runs alone keeps its records in the spool")

    def length_versions(self) -> Sequence[PublishedVersion]:
        return ()  # nobody trains for a gateway that runs alone

    def length_content(self, model: str, version: int) -> bytes | None:
        return None

    def graph_versions(self) -> Sequence[PublishedVersion]:
        return ()

    def graph_content(self, tenant: str, version: int) -> bytes | None:
        return None

    def version_outcomes(self, gateway: str, what: str, outcomes: Sequence[VersionOutcome]) -> None:
        raise NoDatabase("a gateway that runs alone is given no versions")

    def refusals(self, gateway: str, figures: Mapping[str, Any]) -> DecisionMessage:
        raise NoDatabase("a gateway that runs alone keeps no audit")

    def records_lost(self, gateway: str, figures: Mapping[str, Any]) -> DecisionMessage:
        raise NoDatabase("a gateway that runs alone keeps no audit")

    def keys_used(self, key_ids: Iterable[int]) -> None:
        raise NoDatabase("a gateway that runs alone keeps no list of keys")
