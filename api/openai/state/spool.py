"""Records on disk that PostgreSQL did not take: files of JSON lines, one for each batch and kind, within bounds."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import orjson

from api.openai.state.losses import OTHER, REFUSED, Loss, kind_of, loss_of
from controller.core.types import StoredRecord, record_as_dict, record_from_dict

log = logging.getLogger(__name__)

BLOCK = 4096  # bytes that the smallest file takes
USUAL_BYTES = 1_000  # of a record in a file whose name does not say how many it has
MOST_SET_ASIDE = 1_000  # files of records that the database refuses
REFUSALS = ".refusals.jsonl"


@dataclass(frozen=True, slots=True)
class RecordBounds:
    """What a gateway keeps of records that PostgreSQL has not taken: in memory, and on disk."""

    buffer_records: int = 100_000
    buffer_bytes: int = 64 << 20
    spool_records: int = 5_000_000
    spool_bytes: int = 1 << 30


@dataclass(frozen=True, slots=True)
class _File:
    kind: str
    size: int
    records: int


class Spool:
    """Oldest first by name. Only whole files have their final name. Not thread-safe: one thread works on it.

    Beyond its bounds the oldest refusals are given up, then the oldest other records; refusals never displace others.
    `lost` has what was given up until its owner takes it.
    """

    def __init__(self, folder: Path, bounds: RecordBounds | None = None) -> None:
        self.folder = folder
        self.bounds = bounds or RecordBounds()
        self.lost: list[Loss] = []
        self.held_bytes = self.held_records = 0
        folder.mkdir(parents=True, exist_ok=True)
        folder.chmod(0o700)  # records name tenants and what they did, which other users of the machine must not read
        for part in folder.glob("*.part"):  # of a process that died while it wrote: half a batch
            part.unlink(missing_ok=True)
        self._serial = 0
        self._files: dict[Path, _File] = {}  # the oldest first
        self.files()

    def save(self, records: Sequence[StoredRecord]) -> list[Path]:
        """Write them, in one file for each kind. Raises OSError; what was written then is written again later."""
        saved = []
        for kind in (OTHER, REFUSED):
            if batch := [record for record in records if kind_of(record) == kind]:
                path = self._save(kind, batch)
                saved += [path] if path is not None else []
        return saved

    def _save(self, kind: str, batch: Sequence[StoredRecord]) -> Path | None:
        raw = b"".join(self._line(record) for record in batch)
        if not self._make_room(kind, max(BLOCK, len(raw)), len(batch)):
            self.lost.append(loss_of("disk", kind, batch))
            return None
        self._serial += 1
        name = f"{time.time_ns():020d}-{os.getpid()}-{self._serial:06d}-{len(batch)}"
        path = self.folder / f"{name}{REFUSALS if kind == REFUSED else '.jsonl'}"
        part = self.folder / f"{name}.part"
        try:
            with part.open("wb") as file:
                file.write(raw)
                file.flush()
                os.fsync(file.fileno())
            part.rename(path)
        except BaseException:
            with suppress(OSError):  # on a full disk it would take the room of the next try
                part.unlink(missing_ok=True)
            raise
        self._hold(path, _File(kind, max(BLOCK, len(raw)), len(batch)))
        return path

    def _line(self, record: StoredRecord) -> bytes:
        """Empty for a record that JSON cannot hold, which is set aside: its batch must not wait for it."""
        try:
            return orjson.dumps(record_as_dict(record)) + b"\n"
        except TypeError as error:
            log.error("record %s cannot be written as JSON: %s", record.id, error)
            self.set_aside(record)
            return b""

    def _make_room(self, kind: str, size: int, records: int) -> bool:
        """Give up what is oldest until there is room. False: there is none for this kind."""
        bounds = self.bounds
        while self.held_bytes + size > bounds.spool_bytes or self.held_records + records > bounds.spool_records:
            victim = self._oldest(REFUSED) or (self._oldest(OTHER) if kind == OTHER else None)
            if victim is None:
                return False
            self.lost.append(loss_of("disk", self._files[victim].kind, self.load(victim)))
            self.done(victim)
        return True

    def _oldest(self, kind: str) -> Path | None:
        return next((path for path, file in self._files.items() if file.kind == kind), None)

    @property
    def held_files(self) -> int:
        return len(self._files)

    def _hold(self, path: Path, file: _File) -> None:
        self._files[path] = file
        self.held_bytes += file.size
        self.held_records += file.records

    def _forget(self, path: Path) -> None:
        file = self._files.pop(path, None)
        if file is not None:
            self.held_bytes -= file.size
            self.held_records -= file.records

    def set_aside(self, record: StoredRecord) -> Path | None:
        """Keep a record that the database refuses in a file of its own, for an operator. None: there are too many."""
        if sum(1 for _ in self.folder.glob("*.refused")) >= MOST_SET_ASIDE:
            self.lost.append(loss_of("disk", kind_of(record), [record]))
            return None
        path = self.folder / f"{record.id}.refused"
        path.write_bytes(_described(record))
        return path

    def files(self) -> list[Path]:
        """In the order in which they are replayed: refusals after all others."""
        found = sorted(self.folder.glob("*.jsonl"))
        for path in found:
            if path not in self._files:  # of an earlier process, or put there by an operator
                self._hold(path, _seen(path))
        for path in self._files.keys() - set(found):
            self._forget(path)
        return sorted(found, key=lambda path: path.name.endswith(REFUSALS))

    def load(self, path: Path) -> list[StoredRecord]:
        """Unreadable lines are logged and left out, or they would block the rest forever."""
        records = []
        for number, line in enumerate(path.read_bytes().splitlines(), start=1):
            try:
                records.append(record_from_dict(orjson.loads(line)))
            except (orjson.JSONDecodeError, TypeError) as error:
                log.error("%s line %d is not a record: %s", path, number, error)
        return records

    def done(self, path: Path) -> None:
        """Remove a file: its records are stored, or given up."""
        path.unlink(missing_ok=True)
        self._forget(path)


def _described(record: StoredRecord) -> bytes:
    """For an operator: JSON, or else what Python shows of it."""
    try:
        return orjson.dumps(record_as_dict(record))
    except TypeError:  # an integer of more than 64 bits
        try:
            return ascii(record).encode()
        except ValueError as error:  # one of thousands of digits
            return f"record {record.id}: {error}".encode()


def _seen(path: Path) -> _File:
    """A file of an earlier process; of an earlier version if its name does not say how many records it has."""
    size = path.stat().st_size
    parts = path.name.split(".")[0].split("-")
    told = parts[3] if len(parts) > 3 else ""
    records = int(told) if told.isdigit() else size // USUAL_BYTES + 1
    return _File(REFUSED if path.name.endswith(REFUSALS) else OTHER, max(BLOCK, size), records)
