"""The gateway's queue for those who watch: the whole once, then what changed, merged over a tick.

The dispatcher's journal names the requests that came, left or moved since the last look, so a tick costs what happened
in it, whatever waits. Rows hold instants instead of ages: one that only waits is not sent again. Where thousands move
at once, predicted anew or cancelled, they are told in several messages, each a version of its own.
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

ROWS_AT_ONCE = 500  # read between two turns of the loop, told in one message: some milliseconds, a hundred kilobytes


class Waiting(Protocol):
    """The part of a dispatcher that is read here."""

    journal: Journal

    def queue(self) -> QueueView: ...


class QueueFeed:
    """What readers were told. `clock_s`: epoch seconds less the dispatcher's clock, fixed as long as the feed lives.
    `now`: epoch seconds."""

    def __init__(self, gateway: str, waiting: Waiting, clock_s: float, now: Callable[[], float] = time.time) -> None:
        self.gateway = gateway
        self.id = secrets.token_hex(6)
        self.version = 0
        self._waiting = waiting
        self._now = now
        self._clock_s = clock_s
        self._told: dict[str, QueueRow] = {}
        self._untold: dict[str, None] = {}  # ids that may have changed, in the order in which they did
        self._at = 0.0

    @property
    def behind(self) -> bool:
        """Is there more to tell than the last changes held?"""
        return bool(self._untold)

    async def start(self) -> None:
        """Reads the queue a part at a time. What happens meanwhile is in the journal, so in the next changes."""
        self._waiting.journal.follow(True)
        ids = self._waiting.queue().ids()
        for first in range(0, len(ids), ROWS_AT_ONCE):
            queue = self._waiting.queue()
            for request_id in ids[first : first + ROWS_AT_ONCE]:
                if (row := queue.row(request_id, self._clock_s)) is not None:
                    self._told[request_id] = row
            await asyncio.sleep(0)

    def stop(self) -> None:
        self._waiting.journal.follow(False)

    def changes(self, rates: dict[str, float]) -> QueueChanges:
        """Since the last call, of `ROWS_AT_ONCE` requests at most. The version goes up only if there are any."""
        queue = self._waiting.queue()
        put, gone = [], []
        self._untold.update(dict.fromkeys(self._waiting.journal.take()))
        for request_id in list(islice(self._untold, ROWS_AT_ONCE)):
            del self._untold[request_id]
            row = queue.row(request_id, self._clock_s)
            if row is None:
                if self._told.pop(request_id, None) is not None:
                    gone.append(request_id)
            elif row != self._told.get(request_id):
                self._told[request_id] = row
                put.append(row)
        base = self.version
        if put or gone:
            self.version += 1
        # Readers take what is later than what they have: of one moment, or of a clock set back, it would seem old.
        self._at = max(self._now(), math.nextafter(self._at, math.inf))
        return QueueChanges(
            gateway=self.gateway,
            feed=self.id,
            base=base,
            version=self.version,
            at=self._at,
            rates=rates,
            total=len(self._told),
            put=put,
            gone=gone,
        )

    def whole(self, rates: dict[str, float], asked: int) -> QueueState:
        """As of the last changes."""
        return QueueState(
            gateway=self.gateway,
            feed=self.id,
            version=self.version,
            asked=asked,
            at=self._at or self._now(),
            rates=rates,
            rows=list(self._told.values()),
        )
