"""A command on everything in the queue that matches a filter.

What waits is read from the gateways themselves (their whole queues, asked for on the spot), so it does not matter which
process shows the page or which rows a browser holds. Nothing that arrived after the person confirmed is touched. The
ids are told in parts; each part is answered before the next one is told, and an audit record says what came of all of
them, also when the person stops in the middle or goes away.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import AsyncGenerator, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from asgiref.sync import sync_to_async

from console.live.live_view import row_key
from console.live.polled import fleet_now
from console.live.queue_filter import haystack, words_of
from controller.core.messages import CommandAnswer, QueueRow, QueueState
from controller.services.actors import Actor
from controller.services.queue_commands import queue_filter_command_record
from workers import live

IDS_AT_ONCE = 250
LOOK_S = 1.5  # gateways publish their queue within half a second of being asked
LOOK_EVERY_S = 0.1


@dataclass(frozen=True, slots=True)
class Order:
    """`kind` of command on all that match `key` (tenant and class) and `text` and arrived `until` then (epoch s)."""

    kind: str
    key: str
    text: str
    until: float
    priority: int | None = None
    id: str = ""  # made by who gave the order, to ask what came of it

    def rows(self, state: QueueState) -> list[QueueRow]:
        words = words_of(self.text)
        early = [row for row in state["rows"] if row["arrived_at"] <= self.until]
        if self.key:
            early = [row for row in early if row_key(row["tenant"], row["slo_class"]) == self.key]
        return [row for row in early if words.match(row, haystack(row))]


class Matching(NamedTuple):
    """Ids by the gateway they wait in, the most urgent first; how many gateways did not say what waits in them."""

    by_gateway: dict[str, list[str]]
    missing: int

    @property
    def ids(self) -> list[str]:
        return [each for ids in self.by_gateway.values() for each in ids]


def matching(order: Order) -> Matching:
    """Blocks for up to `LOOK_S`. Raises LiveUnavailable."""
    expected = {fleet["gateway"] for fleet in fleet_now().fleets}
    states = _look(expected)
    found = {}
    for state in states:
        due = sorted((row["due_at"], row["id"]) for row in order.rows(state))
        found[state["gateway"]] = [each for _, each in due]
    return Matching(found, len(expected - found.keys()))


def _look(expected: set[str]) -> list[QueueState]:
    """Of these gateways as of now, and of whoever answers before them; what one published earlier is not acted on.
    Where nobody knows who is there, of all that answer in the time there is."""
    asked, give_up_at = live.ask_queue(), time.monotonic() + LOOK_S
    while True:
        states = [state for state in live.read_queue() if state["asked"] >= asked]
        heard = expected and expected <= {state["gateway"] for state in states}
        if heard or time.monotonic() >= give_up_at:
            return states
        time.sleep(LOOK_EVERY_S)


@dataclass(slots=True)
class Telling:
    """How far it is. `counts`: applied, too_late, gone, and unanswered where their gateway did not answer in time."""

    order: Order
    found: Matching
    actor: Actor
    told: int = 0
    counts: Counter[str] = field(default_factory=Counter)
    answered: set[str] = field(default_factory=set)
    commands: list[str] = field(default_factory=list)
    error: str = ""
    ended: str = "stopped"

    async def run(self) -> AsyncGenerator[dict[str, Any], None]:
        """Progress after each part. Closed early it is recorded as stopped."""
        try:
            for gateway, ids in self._parts():
                await self._finish(asyncio.ensure_future(sync_to_async(self._tell)(gateway, ids)))
                yield self.progress()
            self.ended = "all"
        except live.LiveUnavailable as error:
            self.error, self.ended = str(error), "redis_away"
        finally:
            await sync_to_async(self._record)()

    def progress(self) -> dict[str, Any]:
        names = ("applied", "too_late", "gone", "unanswered")
        return {"told": self.told, "of": len(self.found.ids), **{name: self.counts[name] for name in names}}

    @property
    def outcome(self) -> dict[str, Any]:
        """As it is recorded once it has ended: in full ("all"), "stopped", or with "redis_away"."""
        found = {**self.progress(), "ended": self.ended, "missing": self.found.missing}
        found |= {"order": self.order.id} if self.order.id else {}
        found |= {"error": self.error} if self.error else {}
        return {**found, "gateways": len(self.answered), "commands": self.commands}

    def _parts(self) -> Iterator[tuple[str, list[str]]]:
        """One gateway after the other. Of one that did not answer the rest is left alone."""
        for gateway, ids in self.found.by_gateway.items():
            for first in range(0, len(ids), IDS_AT_ONCE):
                if first and gateway not in self.answered:
                    break
                yield gateway, ids[first : first + IDS_AT_ONCE]

    @staticmethod
    async def _finish(part: asyncio.Future[None]) -> None:
        """What has been told cannot be taken back: its answer is counted, though the person has gone meanwhile."""
        try:
            await asyncio.shield(part)
        except asyncio.CancelledError:
            await part
            raise

    def _tell(self, gateway: str, ids: list[str]) -> None:
        """Where the answer is lost the gateway may have heard it: that part counts as told, and as unanswered."""
        try:
            answers = live.send_command(self.actor.name, self.order.kind, ids, priority=self.order.priority)
        except live.AnswersLost as error:
            self._count(gateway, ids, error.answers)
            raise
        self._count(gateway, ids, answers)

    def _count(self, gateway: str, ids: Sequence[str], answers: Sequence[CommandAnswer]) -> None:
        self.told += len(ids)
        self.answered.discard(gateway)
        self.answered |= {answer["gateway"] for answer in answers}
        self.commands += sorted({answer["command"] for answer in answers})
        applied = {each for answer in answers for each in answer["applied"]}
        too_late = {each for answer in answers for each in answer["too_late"]} - applied
        rest = len(ids) - len(applied) - len(too_late)
        self.counts.update(applied=len(applied), too_late=len(too_late))
        self.counts["gone" if gateway in self.answered else "unanswered"] += rest

    def _record(self) -> None:
        queue_filter_command_record(
            actor=self.actor,
            kind=self.order.kind,
            filter={"key": self.order.key, "text": self.order.text, "until": self.order.until},
            request_ids=self.found.ids,
            outcome=self.outcome,
            priority=self.order.priority,
        )
