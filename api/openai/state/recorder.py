"""Request records on their way to PostgreSQL: buffered, written in batches, spooled to disk when it is away.

No record is lost while the process lives: a batch is dropped only once the database took it, or once it is in a spool
file, which is fsynced for each batch. A batch whose acknowledgement was lost is written again; the writer ignores ids
that are stored. After a crash (kill -9) at most `FLUSH_S` of records are missing, and the next gateway that starts with
the same folder writes the spool.
"""

from __future__ import annotations

import asyncio
import logging
import math
import os
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import orjson

from api.openai.state.offloop import Busy, OffLoop
from controller.core.types import RequestRecord, record_as_dict

log = logging.getLogger(__name__)

FLUSH_S = 0.5
BATCH = 1_000
WRITE_S = 8.0  # a batch takes milliseconds; longer means that the database hangs
RETRY_S = 2.0  # after a failure, before the database is tried again
CLOSE_S = 4.0  # for the last flush: with the 20 s of running requests less than the supervisor gives the whole gateway

Writer = Callable[[Sequence[RequestRecord]], Any]


class Unstorable(Exception):
    """The database answers and refuses what is in the batch: a retry would not help."""


class Spool:
    """Files of JSON lines, one for each batch, oldest first by name. Only whole files have their final name."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        for part in folder.glob("*.part"):  # of a process that died while it wrote: half a batch
            part.unlink(missing_ok=True)
        self._serial = 0

    def save(self, records: Sequence[RequestRecord]) -> Path:
        self._serial += 1
        name = f"{time.time_ns():020d}-{os.getpid()}-{self._serial:06d}"
        path, part = self.folder / f"{name}.jsonl", self.folder / f"{name}.part"
        try:
            with part.open("wb") as file:
                file.writelines(orjson.dumps(record_as_dict(record)) + b"\n" for record in records)
                file.flush()
                os.fsync(file.fileno())
            part.rename(path)
        except BaseException:
            with suppress(OSError):  # on a full disk it would take the room of the next try
                part.unlink(missing_ok=True)
            raise
        return path

    def set_aside(self, record: RequestRecord) -> Path:
        """Keep a record that the database refuses in a file of its own, for an operator."""
        path = self.folder / f"{record.id}.refused"
        path.write_bytes(orjson.dumps(record_as_dict(record)))
        return path

    def files(self) -> list[Path]:
        return sorted(self.folder.glob("*.jsonl"))

    def load(self, path: Path) -> list[RequestRecord]:
        """Unreadable lines are logged and left out, or they would block the rest for ever."""
        records = []
        for number, line in enumerate(path.read_bytes().splitlines(), start=1):
            try:
                records.append(RequestRecord(**orjson.loads(line)))
            except (orjson.JSONDecodeError, TypeError) as error:
                log.error("%s line %d is not a record: %s", path, number, error)
        return records


class Recorder:
    """`writer` blocks, runs in a thread of its own, and must ignore ids that are stored."""

    def __init__(self, writer: Writer, spool: Spool) -> None:
        self.spool = spool
        self.failing_since: float | None = None
        self.written = 0
        self.spooled = 0  # batches on disk, as last seen: a scrape of metrics must not wait for a disk
        self._writer = writer
        self._buffer: deque[RequestRecord] = deque()
        self._hand: Sequence[RequestRecord] = ()  # taken from the buffer, and neither written nor saved yet
        self._under_way: asyncio.Task[None] | None = None
        self._database = OffLoop("records")
        self._disk = OffLoop("spool")
        self._retry_at = 0.0
        self._full = asyncio.Event()
        self._flushing = asyncio.Lock()

    def add(self, record: RequestRecord) -> None:
        self._buffer.append(record)
        if len(self._buffer) >= BATCH:
            self._full.set()

    @property
    def waiting(self) -> int:
        """How many records are in memory only."""
        return len(self._buffer) + len(self._hand)

    async def run(self) -> None:
        while True:
            with suppress(TimeoutError):  # the period is over
                await asyncio.wait_for(self._full.wait(), FLUSH_S)
            self._full.clear()
            # Only this flush holds the batch under way: cancelling the task must not lose it.
            self._under_way = asyncio.ensure_future(self.flush())
            await asyncio.shield(self._under_way)

    async def flush(self) -> None:
        """Write everything buffered to the database, or else to the spool; then write old spool files."""
        async with self._flushing:
            await self._flush()

    async def _flush(self) -> None:
        while self._buffer:
            self._hand = [self._buffer.popleft() for _ in range(min(BATCH, len(self._buffer)))]
            if left := await self._write(self._hand):
                await self._save(left)
            self._hand = ()
        if time.monotonic() >= self._retry_at:
            await self._replay()

    async def _write(self, batch: Sequence[RequestRecord]) -> Sequence[RequestRecord]:
        """Write a batch. Returns the records that were neither written nor set aside."""
        if not batch:
            return ()
        if time.monotonic() < self._retry_at:
            return batch
        try:
            await self._database.call(lambda: self._writer(batch), WRITE_S)
        except Unstorable as error:
            return await self._divide(batch, error)
        except Exception as error:  # any failure keeps the batch
            self._failed(error)
            return batch
        if self.failing_since is not None:
            log.warning("records reach the database again after %.0f s", time.monotonic() - self.failing_since)
        self.failing_since = None
        self.written += len(batch)
        return ()

    async def _divide(self, batch: Sequence[RequestRecord], error: Unstorable) -> Sequence[RequestRecord]:
        """Find the records that the database refuses by halving, and set them aside; write the rest."""
        if len(batch) > 1:
            middle = len(batch) // 2
            return [*await self._write(batch[:middle]), *await self._write(batch[middle:])]
        try:
            path = await self._disk.call(lambda: self.spool.set_aside(batch[0]), WRITE_S)
        except (OSError, TimeoutError, Busy) as trouble:
            log.error("the database refuses record %s, which cannot be set aside: %r", batch[0].id, trouble)
            return batch
        log.error("the database refuses record %s, kept in %s: %s", batch[0].id, path, error)
        return ()

    def _failed(self, error: Exception) -> None:
        if self.failing_since is None:
            log.warning("records are spooled to %s: %r", self.spool.folder, error)
            self.failing_since = time.monotonic()
        self._retry_at = time.monotonic() + RETRY_S

    async def _save(self, batch: Sequence[RequestRecord]) -> None:
        """Spool a batch. With a full disk it stays in memory for the next flush."""
        try:
            await self._disk.call(lambda: self.spool.save(batch), WRITE_S)
            self.spooled += 1
        except (OSError, TimeoutError, Busy) as error:
            log.error("%d records cannot be spooled, they stay in memory: %r", len(batch), error)
            self._hand = batch
            self._put_back()
            await asyncio.sleep(RETRY_S)

    async def _replay(self) -> None:
        paths = await self._disk.call(self.spool.files, WRITE_S)
        self.spooled = len(paths)
        for path in paths:
            records = await self._disk.call(partial(self.spool.load, path), WRITE_S)
            if await self._write(records):  # the file stays as it is: the writer ignores ids that are stored
                return
            await self._disk.call(path.unlink, WRITE_S)
            self.spooled -= 1

    def _put_back(self) -> None:
        self._buffer.extendleft(reversed(self._hand))
        self._hand = ()

    async def close(self) -> None:
        """At shutdown, within CLOSE_S: one last flush. What the database does not take in half that time is spooled.

        Records that neither takes are lost, since the supervisor waits for the end of this process.
        """
        try:
            async with asyncio.timeout(CLOSE_S / 2):
                await self.flush()
        except (OSError, Busy):  # TimeoutError is one
            await self._save_rest()
        if self.waiting:
            given_up = "%d records are lost: neither the database nor %s took them within %g s"
            log.error(given_up, self.waiting, self.spool.folder, CLOSE_S)
        self._database.close()
        self._disk.close()

    async def _save_rest(self) -> None:
        if self._under_way is not None and not self._under_way.done():
            self._under_way.cancel()
            await asyncio.wait([self._under_way])
        self._put_back()
        self._retry_at = math.inf  # the database had its chance
        with suppress(OSError, Busy):
            async with asyncio.timeout(CLOSE_S / 2):
                await self.flush()
