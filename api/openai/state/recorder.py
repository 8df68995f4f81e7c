"""Request records on their way to PostgreSQL: buffered, written in batches, spooled to disk while it is unavailable.

A batch is dropped only once the database took it, or once it is in a spool file, which is fsynced for each batch. So no
record is lost while the process lives and there is room: memory and disk for records have bounds (`RecordBounds`).
Beyond them refusals are given up first, then what is oldest, and `losses` counts it (decision 175).

A batch whose acknowledgement was lost is written again; the writer ignores ids that are stored. After a crash (kill -9)
at most `FLUSH_S` of records are missing, and the next gateway that starts with the same folder writes the spool.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

from api.openai.state.losses import OTHER, REFUSED, Loss, Losses, kind_of, loss_of
from api.openai.state.offloop import Busy, OffLoop
from api.openai.state.spool import Spool
from controller.core.types import StoredRecord, WorkflowCancellation

log = logging.getLogger(__name__)

FLUSH_S = 0.5  # longest time that a record is in memory only
BATCH = 1_000  # records that are written at once, without waiting for FLUSH_S
WRITE_S = 8.0  # a batch takes milliseconds; longer means that the database hangs
RETRY_S = 2.0  # after a failure, before the database is tried again
CLOSE_S = 4.0  # for the last flush: with the 20 s of running requests less than the supervisor gives the whole gateway

Writer = Callable[[Sequence[StoredRecord]], Any]


class Unstorable(Exception):
    """The database answers and refuses what is in the batch: a retry would not help."""


def weight(record: StoredRecord) -> int:
    """Bytes of memory that it takes, roughly: of a request, its decisions are most of it."""
    if isinstance(record, WorkflowCancellation):
        return 500
    return 1_500 + 1_500 * len(record.decisions) + 40 * len(record.token_times)


class Recorder:
    """`writer` blocks, runs in a thread of its own, and must ignore ids that are stored."""

    def __init__(self, writer: Writer, spool: Spool) -> None:
        self.spool = spool
        self.failing_since: float | None = None
        self.written = 0
        self._writer = writer
        self.losses = Losses()
        self._buffers: dict[str, deque[StoredRecord]] = {OTHER: deque(), REFUSED: deque()}  # in the order of writing
        self._buffered_bytes = 0
        self._hand: Sequence[StoredRecord] = ()  # taken from the buffer, and neither written nor saved yet
        self._under_way: asyncio.Task[None] | None = None
        self._database = OffLoop("records")
        self._disk = OffLoop("spool")
        self._retry_at = 0.0
        self._full = asyncio.Event()
        self._flushing = asyncio.Lock()

    def add(self, record: StoredRecord) -> None:
        self._keep(record)
        if self._buffered >= BATCH:
            self._full.set()
        self._within_bounds()

    def cancelled(self, cancellation: WorkflowCancellation) -> None:
        self.add(cancellation)

    @property
    def spooled(self) -> int:
        """Files on disk, as last seen: a scrape of metrics must not wait for a disk."""
        return self.spool.held_files

    @property
    def waiting(self) -> int:
        """How many records are in memory only."""
        return self._buffered + len(self._hand)

    @property
    def _buffered(self) -> int:
        return sum(map(len, self._buffers.values()))

    def _keep(self, record: StoredRecord, *, first: bool = False) -> None:
        buffer = self._buffers[kind_of(record)]
        buffer.appendleft(record) if first else buffer.append(record)
        self._buffered_bytes += weight(record)

    def _take(self, kind: str) -> StoredRecord:
        record = self._buffers[kind].popleft()
        self._buffered_bytes -= weight(record)
        return record

    def _within_bounds(self) -> None:
        """Give up the oldest refusals, then the oldest other records."""
        bounds = self.spool.bounds
        while self._buffered > bounds.buffer_records or self._buffered_bytes > bounds.buffer_bytes:
            kind = REFUSED if self._buffers[REFUSED] else OTHER
            self._lost(loss_of("memory", kind, [self._take(kind)]))

    def _lost(self, loss: Loss) -> None:
        if not self.losses.total:
            log.error("records are lost (%s): see slackline_records_lost_total", loss.where)
        self.losses.add(loss)

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
        while self._buffered:
            self._hand = self._batch()
            try:
                if left := await self._write(self._hand):
                    await self._save(left)
            except Exception:
                self._put_back()
                raise
            self._hand = ()
        if time.monotonic() >= self._retry_at:
            await self._replay()

    def _batch(self) -> Sequence[StoredRecord]:
        return [self._take(kind) for kind in self._kinds(BATCH)]

    def _kinds(self, most: int) -> Sequence[str]:
        """Of the records to write next: refusals after all others."""
        others = min(most, len(self._buffers[OTHER]))
        return [OTHER] * others + [REFUSED] * min(most - others, len(self._buffers[REFUSED]))

    async def _write(self, batch: Sequence[StoredRecord]) -> Sequence[StoredRecord]:
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

    async def _divide(self, batch: Sequence[StoredRecord], error: Unstorable) -> Sequence[StoredRecord]:
        """Find the records that the database refuses by halving, and set them aside; write the rest."""
        if len(batch) > 1:
            middle = len(batch) // 2
            return [*await self._write(batch[:middle]), *await self._write(batch[middle:])]
        try:
            path = await self._disk.call(lambda: self.spool.set_aside(batch[0]), WRITE_S)
        except Exception as trouble:  # whatever is wrong with this one, the others of its batch are written
            log.error("the database refuses record %s, which cannot be set aside: %r", batch[0].id, trouble)
            return batch
        self._told_by_disk()
        log.error("the database refuses record %s, kept in %s: %s", batch[0].id, path, error)
        return ()

    def _failed(self, error: Exception) -> None:
        if self.failing_since is None:
            log.warning("records are spooled to %s: %r", self.spool.folder, error)
            self.failing_since = time.monotonic()
        self._retry_at = time.monotonic() + RETRY_S

    async def _save(self, batch: Sequence[StoredRecord]) -> None:
        """Spool a batch. With a full disk it stays in memory for the next flush."""
        try:
            await self._disk.call(lambda: self.spool.save(batch), WRITE_S)
        except Exception as error:  # any failure keeps the batch
            log.error("%d records cannot be spooled, they stay in memory: %r", len(batch), error)
            self._hand = batch
            self._put_back()
            await asyncio.sleep(RETRY_S)
        self._told_by_disk()

    def _told_by_disk(self) -> None:
        while self.spool.lost:
            self._lost(self.spool.lost.pop())

    async def _replay(self) -> None:
        paths = await self._disk.call(self.spool.files, WRITE_S)
        for path in paths:
            records = await self._disk.call(partial(self.spool.load, path), WRITE_S)
            if await self._write(records):  # the file stays as it is: the writer ignores ids that are stored
                return
            await self._disk.call(partial(self.spool.done, path), WRITE_S)

    def _put_back(self) -> None:
        for record in reversed(self._hand):
            self._keep(record, first=True)
        self._hand = ()
        self._within_bounds()

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
