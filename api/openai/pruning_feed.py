"""The gateway's part of pruning: it reports its queues, and enforces the orders of the coordinator.

A report goes out within 50 ms of a change of the queue while requests wait, and once a period in any case: what a
gateway has sent to instances, and its share of their slots, counts for the requests that wait at others. Building one
takes up to a millisecond for a thousand waiting requests, so the next one waits until that is at most 5 % of the time.
Without Redis, orders in force expire and the dispatcher goes on by its own policies.
"""

from __future__ import annotations

import asyncio
import logging
import math

from api.openai.gateway import Gateway
from controller.core import events as ev
from controller.core.pruning import PruningOrders
from controller.dispatch.queue_report import queue_report
from workers.live import LiveUnavailable, Talks
from workers.pruning import PERIOD_S, VALID_S, publish_report, withdraw_report

log = logging.getLogger(__name__)

LEAST_S = 0.05  # between two reports
SHARE = 20.0  # a report every so many times what the last one took
OFF_S = 0.5  # between two looks at the configuration while pruning is off


class PruningFeed:
    """`wanted` is read from the configuration, so that a gateway that nobody prunes sends nothing."""

    def __init__(self, gateway: Gateway, board: Talks) -> None:
        self._gateway = gateway
        self._board = board
        self._noted = -1  # of the journal, at the last report
        self._reported_at = -math.inf
        self._reported = False  # whether a report of ours is stored
        self._waited = False  # whether it named requests
        self._published_at = -math.inf
        self._took_s = 0.0  # to build the last one

    @property
    def wanted(self) -> bool:
        snapshot = self._gateway.snapshot
        return snapshot is not None and snapshot.pruning

    async def run(self) -> None:
        while True:
            try:
                await self.tick()
            except LiveUnavailable as error:
                log.debug("the queue was not reported to the coordinator of pruning: %s", error)
                self._reported = False
            await asyncio.sleep(max(LEAST_S, SHARE * self._took_s) if self.wanted else OFF_S)

    async def tick(self) -> None:
        """Report if a queue with requests changed, or a period is over. Raises LiveUnavailable."""
        gateway, now = self._gateway, self._gateway.clock()
        dispatcher = gateway.scheduler.dispatcher
        noted = dispatcher.journal.noted
        if not self.wanted or (noted == self._noted and now - self._reported_at < PERIOD_S):
            if not self.wanted:
                await self._withdraw()
            return
        self._noted, self._reported_at = noted, now
        report = queue_report(gateway.scheduler, gateway.options.name, now, gateway.shared.offset)
        self._took_s = gateway.clock() - now
        waits = report.waits
        if waits or self._waited or now - self._published_at >= PERIOD_S:
            await self._board.run(publish_report(report))
            self._reported, self._waited, self._published_at = True, waits, now

    async def _withdraw(self) -> None:
        if self._reported:
            await self._board.run(withdraw_report(self._gateway.options.name))
            self._reported = False

    def enforce(self, orders: PruningOrders) -> None:
        """Orders came, with moments on the clock that gateways share. None are in force for longer than the
        coordinator's are, whatever they say."""
        found = {name: (reason.instance, reason.behind_s) for name, reason in orders.scavengers.items()}
        expires_at = min(orders.expires_at - self._gateway.shared.offset, self._gateway.clock() + VALID_S)
        self._gateway.runtime.push(ev.Orders(orders.sequence, expires_at, found))
