"""The configuration in memory: polled twice a second, read whole after a change, with a copy on disk.

While PostgreSQL is unavailable, a gateway starts from the file and keeps serving from memory, until the configuration
is older than CONFIG_MAX_AGE_S: keys may have been revoked since. A Redis notice only makes it poll earlier, so a
revoked key stops within a second with Redis unavailable too.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Protocol

import orjson

from api.openai.state.offloop import OffLoop
from controller.core.snapshot import GatewaySnapshot, snapshot_from_json

log = logging.getLogger(__name__)

POLL_S = 0.5  # one row is read: a revoked key stops within a second without Redis too
READ_S = 8.0  # then PostgreSQL counts as unavailable
STAMP_S = 60.0  # how often the file is stamped with the time of the last confirmation
CLOCKS_DIFFER_S = 60.0  # a file from further in the future than this has an unknown age


class ConfigStore(Protocol):
    """Blocking reads of the stored configuration."""

    def version(self) -> int: ...

    def snapshot(self) -> GatewaySnapshot: ...


class SnapshotFile:
    """Replaced as a whole, so that a crash leaves the old or the new one. Contains key hashes: mode 0600."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def save(self, snapshot: GatewaySnapshot, confirmed_at: float) -> None:
        """`confirmed_at`: epoch seconds at which the database last confirmed it. It is kept inside the file, since the
        file's own time changes when a backup is restored."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        part = self.path.with_suffix(".part")
        part.touch(mode=0o600)
        part.write_bytes(orjson.dumps({**asdict(snapshot), "confirmed_at": confirmed_at}, default=_plain))
        part.replace(self.path)

    def load(self) -> tuple[GatewaySnapshot, float] | None:
        """The snapshot, and when it was last confirmed (epoch seconds; 0 in a file of an older release). None without a
        file, or if it cannot be read (which is logged)."""
        try:
            raw = orjson.loads(self.path.read_bytes())
            return snapshot_from_json(raw), float(raw.get("confirmed_at", 0.0))
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
        self._stamped_at = -math.inf  # monotonic: when the file was last written
        self._current: GatewaySnapshot | None = None  # as the database gave it
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
        found = self._file.load()
        if found is not None:
            snapshot, confirmed_at = found
            age_s = time.time() - confirmed_at
            if age_s < -CLOCKS_DIFFER_S:  # a clock was set, so nobody knows how old it is
                age_s = math.inf
            self.confirmed_at = time.monotonic() - max(0.0, age_s)
            log.warning(
                "PostgreSQL is unavailable: configuration %d from %s, last confirmed %.0f s ago",
                *(snapshot.version, self._file.path, age_s),
            )
            self._take(snapshot, "file")

    async def run(self) -> None:
        while True:
            with suppress(TimeoutError):
                await asyncio.wait_for(self._notice.wait(), POLL_S)
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
                self._current = await self._thread.call(self._store.snapshot, READ_S)
                self._take(self._current, "database")
                self._stamped_at = -math.inf
            if self._current is not None and time.monotonic() - self._stamped_at >= STAMP_S:
                await self._save(self._current)
        except Exception as error:  # any failure to read keeps the present configuration
            if not self._failing:
                log.warning("configuration cannot be read, the last one stays: %r", error)
            self._failing = True
            return False
        self._failing = False
        self.confirmed_at = time.monotonic()
        return True

    async def _save(self, snapshot: GatewaySnapshot) -> None:
        self._stamped_at, confirmed_at = time.monotonic(), time.time()
        try:
            await self._thread.call(lambda: self._file.save(snapshot, confirmed_at), READ_S)
        except (OSError, TimeoutError) as error:
            log.error("configuration %d is not on disk: %s", snapshot.version, error)

    def _take(self, snapshot: GatewaySnapshot, origin: str) -> None:
        self.version = snapshot.version
        self.origin = origin
        self._apply(snapshot)

    def age_s(self) -> float | None:
        """Seconds since the database confirmed the configuration; None before there is one."""
        return None if self.confirmed_at is None else time.monotonic() - self.confirmed_at

    def close(self) -> None:
        self._thread.close()
