"""Publishes the gateway's state for scaler and pages, in the background: Redis never holds up the data path.

Once a period the fleet message is written to its key. While somebody watches, merged updates are sent at most four
times a second, and of the queue only what changed; all of it when a reader requests it. The refusals of ten seconds
become one decision, of a longer time while PostgreSQL is unavailable.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections import Counter
from collections.abc import Awaitable, Iterable, Mapping
from functools import partial
from itertools import count
from typing import Any, Protocol

from api.openai import status
from api.openai.gateway import Gateway
from api.openai.state.losses import Losses, figures
from api.openai.state.offloop import OffLoop
from api.openai.state.queue_feed import QueueFeed
from api.openai.state.shares import Shares
from controller.core.decisions import DecisionMessage
from controller.core.events import Command
from controller.core.messages import (
    LIVE_DECISIONS,
    LIVE_OVERVIEW,
    LIVE_QUEUE,
    CommandAnswer,
    CommandMessage,
    FleetMessage,
    QueueState,
)
from workers.live import LiveUnavailable

log = logging.getLogger(__name__)

TICK_S = 0.25
MESSAGES_A_TICK = 8  # of the queue, some hundred rows each: ten thousand changes are sent within a second
WHOLE_QUEUE_S = 0.5  # shortest time between two whole queues: 10,000 requests are two megabytes
KEPT_PERIODS = 3  # how long a published state stays in Redis: readers then know that its gateway is gone
REFUSALS_S = 10.0  # refusals of so long a time become one decision, or a flood of them would fill the audit
WRITE_S = 5.0  # then PostgreSQL counts as unavailable and the batch is kept


class LiveBoard(Protocol):
    """The part of workers.live.LiveState that is used here."""

    async def watched(self, topics: list[str]) -> set[str]: ...

    async def publish_fleet(self, message: FleetMessage, ttl_s: float) -> None: ...

    async def aread_fleet(self) -> list[FleetMessage]: ...

    async def server_time(self) -> float: ...

    async def queue_asked(self) -> int: ...

    async def publish_queue(self, state: QueueState) -> None: ...

    async def send(self, topic: str, data: Any) -> None: ...

    async def answer(self, answer: CommandAnswer) -> None: ...


class Audit(Protocol):
    """Blocking writes to PostgreSQL."""

    def refusals(self, gateway: str, figures: Mapping[str, Any]) -> DecisionMessage:
        """Records a batch of refusals as one decision; returns its message for live pages."""
        ...

    def records_lost(self, gateway: str, figures: Mapping[str, Any]) -> DecisionMessage:
        """Records that records of requests were given up; returns its message for live pages."""
        ...

    def keys_used(self, key_ids: Iterable[int]) -> None: ...


class Publisher:
    """Writes to the audit go through `store`, in a thread."""

    def __init__(self, gateway: Gateway, board: LiveBoard, store: Audit, losses: Losses | None = None) -> None:
        self._gateway = gateway
        self._losses = losses or Losses()
        self._board = board
        self._store = store
        self._seq = count(1)
        self._published_at = 0.0
        self._clock_at = -math.inf
        self._refusals_at = self._refused_since = gateway.clock()
        self._shares = Shares(gateway.options.name)
        self._feed: QueueFeed | None = None  # while somebody watches the queue
        self._answered = 0
        self._whole_at = -WHOLE_QUEUE_S
        self._thread = OffLoop("audit")
        self._failing: set[str] = set()  # parts that could not be published when last tried

    async def run(self) -> None:
        while True:
            await asyncio.sleep(min(TICK_S, self._gateway.monitor.period_s))
            await self.tick()

    async def tick(self) -> None:
        now = self._gateway.clock()
        if now - self._clock_at >= self._gateway.monitor.period_s:
            await self.read_clock()
        try:
            watched = await self._board.watched([LIVE_OVERVIEW, LIVE_QUEUE])
            await self._alone("fleet", self._fleet(now, LIVE_OVERVIEW in watched))
            await self._alone("queue", self._queue(now, LIVE_QUEUE in watched))
            self._gateway.redis = "ok"
        except LiveUnavailable as error:
            if self._gateway.redis != "away":
                told = "Redis is unavailable: nothing is published, quotas and shares stay as last known: %s"
                log.warning(told, error)
            self._gateway.redis = "away"
            self._unfollow()  # or changes would pile up until Redis is back
        if now - self._refusals_at >= REFUSALS_S:
            self._refusals_at = now
            await self._refusals(now)
            await self._lost()
            await self._keys()

    async def _alone(self, what: str, publishing: Awaitable[None]) -> None:
        """A defect of one part, such as a figure that JSON cannot hold, does not stop the others."""
        try:
            await publishing
        except LiveUnavailable:
            raise
        except Exception:
            self._gateway.unpublished[what] += 1
            if what not in self._failing:
                log.exception("the state of the %s cannot be published", what)
            self._failing.add(what)
        else:
            self._failing.discard(what)

    async def read_clock(self) -> None:
        """The clock that all gateways share; without Redis it goes on from the last reading."""
        gateway = self._gateway
        sent = self._clock_at = gateway.clock()
        try:
            gateway.shared.heard(await self._board.server_time(), sent, gateway.clock())
        except LiveUnavailable as error:
            log.debug("the shared clock was not read: %s", error)
        gateway.tell_clock()

    async def _fleet(self, now: float, watched: bool) -> None:
        period_s = self._gateway.monitor.period_s
        due = now - self._published_at >= period_s - TICK_S / 10  # a tick that comes a little early counts
        if not (due or watched):
            return
        message = status.fleet_message(self._gateway, next(self._seq), status.windows(self._gateway, now))
        if due:
            self._published_at = now
            await self._board.publish_fleet(message, max(KEPT_PERIODS * period_s, 1.0))
            await self._share()
        if watched:
            await self._board.send(LIVE_OVERVIEW, message)

    async def _queue(self, now: float, watched: bool) -> None:
        """The whole queue first, if a reader requested it, then changes, so that a reader has what they change."""
        if not watched:
            self._unfollow()
            return
        gateway = self._gateway
        if self._feed is None:
            shared = gateway.shared
            self._feed = QueueFeed(gateway.options.name, gateway.scheduler.dispatcher, shared.offset, shared.now)
            self._answered = 0
            await self._feed.start()
        asked = await self._board.queue_asked()
        rates = gateway.ledger.finished.rates(now)
        changes = self._feed.changes(rates)
        if asked != self._answered and now - self._whole_at >= WHOLE_QUEUE_S:
            await self._board.publish_queue(self._feed.whole(rates, asked))
            self._answered, self._whole_at = asked, now
        await self._board.send(LIVE_QUEUE, changes)
        for _ in range(MESSAGES_A_TICK - 1):
            if not self._feed.behind:
                return
            await self._board.send(LIVE_QUEUE, self._feed.changes(rates))

    def _unfollow(self) -> None:
        if self._feed is not None:
            self._feed.stop()
            self._feed = None

    async def _share(self) -> None:
        """Tell the scheduler which share of each instance is this gateway's."""
        share = self._shares.of(await self._board.aread_fleet(), self._gateway.shared.now())
        for change in self._shares.changes(share, list(self._gateway.fleet.seats)):
            self._gateway.runtime.push(change)

    # ---- refusals -------------------------------------------------------------------------------------------------

    async def _refusals(self, now: float) -> None:
        """One decision for each batch; with PostgreSQL unavailable it grows. Each refusal is in the records too."""
        batch, self._gateway.ledger.refusals = self._gateway.ledger.refusals, Counter()
        if not batch:
            self._refused_since = now
            return
        figures = _figures(batch, now - self._refused_since)
        try:
            record = partial(self._store.refusals, self._gateway.options.name, figures)
            message = await self._thread.call(record, WRITE_S)
        except Exception as error:  # any failure keeps the batch
            log.warning("%d refusals are not yet in the audit: %r", batch.total(), error)
            self._gateway.ledger.refusals.update(batch)
            return
        self._refused_since = now
        await self._show(message)

    async def _lost(self) -> None:
        """One decision on all records that were given up since the last one; with PostgreSQL unavailable it waits."""
        untold = self._losses.take()
        if not untold:
            return
        try:
            record = partial(self._store.records_lost, self._gateway.options.name, figures(untold))
            message = await self._thread.call(record, WRITE_S)
        except Exception as error:  # any failure keeps them for the next decision
            log.warning("lost records are not yet in the audit: %r", error)
            self._losses.give_back(untold)
            return
        await self._show(message)

    async def _show(self, message: DecisionMessage) -> None:
        try:
            await self._board.send(LIVE_DECISIONS, message)
        except LiveUnavailable as error:
            log.info("decision %s was not shown live: %s", message["id"], error)

    async def _keys(self) -> None:
        """Write when keys were last used; with PostgreSQL unavailable they are written with the next batch."""
        used = self._gateway.used_keys
        if not used:
            return
        self._gateway.used_keys = set()
        try:
            await self._thread.call(lambda: self._store.keys_used(used), WRITE_S)
        except Exception as error:  # any failure keeps them for the next batch
            log.info("last use of %d keys is not yet stored: %r", len(used), error)
            self._gateway.used_keys |= used

    # ---- commands -------------------------------------------------------------------------------------------------

    def command(self, message: CommandMessage) -> None:
        """A command from the console: applied to queued requests and acknowledged. An expired one changes nothing."""
        answer = self.apply(message)
        self._gateway.runtime.spawn(self._answer(answer))

    def apply(self, message: CommandMessage) -> CommandAnswer:
        late = message["expires_at"] < self._gateway.shared.now()
        answer = CommandAnswer(
            command=message["id"], gateway=self._gateway.options.name, applied=[], gone=[], too_late=[]
        )
        for request_id in message["request_ids"]:
            in_flight = self._gateway.runtime.requests.get(request_id)
            if in_flight is None:
                answer["gone"].append(request_id)
            elif late or not self._gateway.runtime.waits(in_flight):
                answer["too_late"].append(request_id)
            else:
                answer["applied"].append(request_id)
        if answer["applied"]:
            ids = tuple(answer["applied"])
            kind: Any = message["kind"]
            self._gateway.runtime.push(Command(message["id"], message["actor"], kind, ids, message["priority"]))
        return answer

    async def _answer(self, answer: CommandAnswer) -> None:
        try:
            await self._board.answer(answer)
        except LiveUnavailable as error:
            log.warning("the answer to command %s was not delivered: %s", answer["command"], error)

    def close(self) -> None:
        self._thread.close()


def _figures(batch: Counter[tuple[str, str, str]], seconds: float) -> dict[str, Any]:
    codes: Counter[str] = Counter()
    classes: Counter[str] = Counter()
    for (tenant, name, code), number in batch.items():
        codes[code] += number
        classes[f"{tenant}/{name}"] += number
    return {
        "commonest": min(codes, key=lambda code: (-codes[code], code)),
        "requests": batch.total(),
        "seconds": round(seconds, 1),
        "by_code": dict(sorted(codes.items())),
        "by_class": dict(sorted(classes.items())),
    }
