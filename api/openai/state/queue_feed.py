"""The gateway's queue for watching pages: the whole once, then what changed, merged over a tick.

The dispatcher's journal lists the requests that came, left or moved since it was last read, so a tick costs what
happened in it, however many wait. Rows hold points in time instead of ages, so a request that only waits is not sent
again. Where thousands move at once (cancelled, or with a new prediction), they go in several messages, each a version
of its own.
"""

from __future__ import annotations

import asyncio
import math
import secrets
import time
from collections.abc import Callable
from itertools import islice
from typing import Protocol

from controller.core.messages import QueueChanges, QueueRow, QueueState
from controller.dispatch.queue import Journal, QueueView

ROWS_AT_ONCE = 500  # read in one go and sent in one message: some milliseconds, a hundred kilobytes


class Waiting(Protocol):
    """The part of a dispatcher that is read here."""

    journal: Journal

    def queue(self) -> QueueView: ...


class QueueFeed:
    """What readers have. `clock_s`: epoch seconds minus the dispatcher's clock, fixed for the life of the feed. `now`:
    epoch seconds."""

    def __init__(self, gateway: str, waiting: Waiting, clock_s: float, now: Callable[[], float] = time.time) -> None:
        self.gateway = gateway
        self.id = secrets.token_hex(6)
        self.version = 0
        self._waiting = waiting
        self._now = now
        self._clock_s = clock_s
        self._sent: dict[str, QueueRow] = {}
        self._unsent: dict[str, None] = {}  # ids that may have changed, in order
        self._at = 0.0

    @property
    def behind(self) -> bool:
        """Whether there are more changes than the last ones returned."""
        return bool(self._unsent)

    async def start(self) -> None:
        """Read the queue a part at a time. What happens meanwhile is in the journal, and so in the next changes."""
        self._waiting.journal.follow(True)
        ids = self._waiting.queue().ids()
        for first in range(0, len(ids), ROWS_AT_ONCE):
            queue = self._waiting.queue()
            for request_id in ids[first : first + ROWS_AT_ONCE]:
                if (row := queue.row(request_id, self._clock_s)) is not None:
                    self._sent[request_id] = row
            await asyncio.sleep(0)

    def stop(self) -> None:
        self._waiting.journal.follow(False)

    def changes(self, rates: dict[str, float]) -> QueueChanges:
        """Changes since the last call, of at most `ROWS_AT_ONCE` requests. The version grows only if there are any."""
        queue = self._waiting.queue()
        put, gone = [], []
        self._unsent.update(dict.fromkeys(self._waiting.journal.take()))
        for request_id in list(islice(self._unsent, ROWS_AT_ONCE)):
            del self._unsent[request_id]
            row = queue.row(request_id, self._clock_s)
            if row is None:
                if self._sent.pop(request_id, None) is not None:
                    gone.append(request_id)
            elif row != self._sent.get(request_id):
                self._sent[request_id] = row
                put.append(row)
        base = self.version
        if put or gone:
            self.version += 1
        # Readers take only what is later than what they have, so the time must grow even if the clock does not.
        self._at = max(self._now(), math.nextafter(self._at, math.inf))
        return QueueChanges(
            gateway=self.gateway,
            feed=self.id,
            base=base,
            version=self.version,
            at=self._at,
            rates=rates,
            total=len(self._sent),
            put=put,
            gone=gone,
        )

    def whole(self, rates: dict[str, float], asked: int) -> QueueState:
        """The whole queue, as of the last changes."""
        return QueueState(
            gateway=self.gateway,
            feed=self.id,
            version=self.version,
            asked=asked,
            at=self._at or self._now(),
            rates=rates,
            rows=list(self._sent.values()),
        )
