"""The gateway's queue for those who watch: the whole once, then what changed, merged over a tick.

The dispatcher's journal names the requests that came, left or moved since the last look, so a tick costs what happened
in it, whatever waits. Rows hold instants instead of ages: one that only waits is not sent again.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from typing import Protocol

from controller.core.messages import QueueChanges, QueueRow, QueueState
from controller.dispatch.queue import Journal, QueueView

ROWS_AT_ONCE = 500  # read between two turns of the loop: about a millisecond


class Waiting(Protocol):
    """The part of a dispatcher that is read here."""

    journal: Journal

    def queue(self) -> QueueView: ...


class QueueFeed:
    """What readers were told. `clock_s`: epoch seconds less the dispatcher's clock, fixed as long as the feed lives."""

    def __init__(self, gateway: str, waiting: Waiting, clock_s: float) -> None:
        self.gateway = gateway
        self.id = secrets.token_hex(6)
        self.version = 0
        self._waiting = waiting
        self._clock_s = clock_s
        self._told: dict[str, QueueRow] = {}

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
        """Since the last call. The version goes up only if there are any."""
        queue = self._waiting.queue()
        put, gone = [], []
        for request_id in self._waiting.journal.take():
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
        return QueueChanges(
            gateway=self.gateway,
            feed=self.id,
            base=base,
            version=self.version,
            at=time.time(),
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
            at=time.time(),
            rates=rates,
            rows=list(self._told.values()),
        )
