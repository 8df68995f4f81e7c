"""The configuration in memory: polled twice a second, read whole after a change, with a copy on disk.

While PostgreSQL is away a gateway starts from the file and keeps serving from memory. A Redis notice only makes it poll
earlier, so a revoked key stops within a second with Redis away too.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Protocol

import orjson

from api.openai.state.offloop import OffLoop
from controller.core.snapshot import GatewaySnapshot, snapshot_from_json

log = logging.getLogger(__name__)

POLL_S = 0.5
READ_S = 8.0


class ConfigStore(Protocol):
    """Blocking reads of the stored configuration."""

    def version(self) -> int: ...

    def snapshot(self) -> GatewaySnapshot: ...


class SnapshotFile:
    """Replaced as a whole, so that a crash leaves the old or the new one. Contains key hashes: mode 0600."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def save(self, snapshot: GatewaySnapshot) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        part = self.path.with_suffix(".part")
        part.touch(mode=0o600)
        part.write_bytes(orjson.dumps(asdict(snapshot), default=_plain))
        part.replace(self.path)

    def load(self) -> GatewaySnapshot | None:
        """The snapshot; None without a file, or if it cannot be read (which is logged)."""
        try:
            return snapshot_from_json(orjson.loads(self.path.read_bytes()))
        except FileNotFoundError:
            return None
        except (orjson.JSONDecodeError, KeyError, TypeError, ValueError) as error:
            log.error("the configuration in %s cannot be read: %s", self.path, error)
            return None


def _plain(value: object) -> object:
    """Named tuples as objects, which JSON would write as lists."""
    if isinstance(value, tuple) and hasattr(value, "_asdict"):
        return value._asdict()
    raise TypeError(f"{type(value).__name__} cannot be stored")


class SnapshotSource:
    """`apply` is called on the loop with each new snapshot."""

    def __init__(self, store: ConfigStore, file: SnapshotFile, apply: Callable[[GatewaySnapshot], None]) -> None:
        self.version: int | None = None
        self.confirmed_at: float | None = None  # monotonic: when the database last confirmed that this is the newest
        self.origin = "none"  # none | file | database
        self._store = store
        self._file = file
        self._apply = apply
        self._thread = OffLoop("configuration", abandon_s=30.0)
        self._notice = asyncio.Event()
        self._failing = False

    async def start(self) -> None:
        """Apply the snapshot of the database, or else of the file. Without either the gateway answers 503."""
        if await self.poll():
            return
        snapshot = self._file.load()
        if snapshot is not None:
            log.warning("PostgreSQL is away: serving configuration %d from %s", snapshot.version, self._file.path)
            self._take(snapshot, "file")

    async def run(self) -> None:
        while True:
            try:
                await asyncio.wait_for(self._notice.wait(), POLL_S)
            except TimeoutError:
                self._notice.clear()
            self._notice.clear()
            await self.poll()

    def notice(self, version: int) -> None:
        """A newer configuration was announced: poll now."""
        if version != self.version:
            self._notice.set()

    async def poll(self) -> bool:
        """True if the database answered. On its errors the old configuration stays."""
        try:
            version = await self._thread.call(self._store.version, READ_S)
            if version != self.version or self.origin != "database":
                snapshot = await self._thread.call(self._store.snapshot, READ_S)
                self._take(snapshot, "database")
                await self._save(snapshot)
        except Exception as error:  # any failure to read keeps the present configuration
            if not self._failing:
                log.warning("configuration cannot be read, the last one stays: %r", error)
            self._failing = True
            return False
        self._failing = False
        self.confirmed_at = time.monotonic()
        return True

    async def _save(self, snapshot: GatewaySnapshot) -> None:
        try:
            await self._thread.call(lambda: self._file.save(snapshot), READ_S)
        except (OSError, TimeoutError) as error:
            log.error("configuration %d is not on disk: %s", snapshot.version, error)

    def _take(self, snapshot: GatewaySnapshot, origin: str) -> None:
        self.version = snapshot.version
        self.origin = origin
        self._apply(snapshot)

    def age_s(self) -> float | None:
        return None if self.confirmed_at is None else time.monotonic() - self.confirmed_at

    def close(self) -> None:
        self._thread.close()
