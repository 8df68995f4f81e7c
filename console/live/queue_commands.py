"""A command on every queued request that matches a filter.

The requests are read from the gateways themselves (each publishes its whole queue on request), so it does not matter
which process serves the page or which rows the browser holds. Requests that arrived after the confirmation are not
included. Ids are sent in batches; each batch is answered before the next is sent. One audit record has the outcome,
also when the operator stops the command or closes the page.
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
from controller.postgres.waiting import give_back_connection
from controller.services.actors import Actor
from controller.services.records.queue_commands import queue_filter_command_record
from workers import live

IDS_AT_ONCE = 250
LOOK_S = 1.5  # gateways publish their queue within half a second of being asked
LOOK_EVERY_S = 0.1


@dataclass(frozen=True, slots=True)
class Order:
    """A command of `kind` on requests that match `key` (tenant/class) and `text` and arrived by `until` (epoch s)."""

    kind: str
    key: str
    text: str
    until: float
    priority: int | None = None
    id: str = ""  # chosen by the browser, to ask for the outcome later

    def rows(self, state: QueueState) -> list[QueueRow]:
        words = words_of(self.text)
        early = [row for row in state["rows"] if row["arrived_at"] <= self.until]
        if self.key:
            early = [row for row in early if row_key(row["tenant"], row["slo_class"]) == self.key]
        return [row for row in early if words.match(row, haystack(row))]


class Matching(NamedTuple):
    """Ids by gateway, most urgent first, and the number of gateways that did not report their queue."""

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
    """Queues published after this call, by the expected gateways and any other that answers before them. If no gateway
    is known, by all that answer within LOOK_S. Queues published earlier are not used."""
    give_back_connection()
    asked, give_up_at = live.ask_queue(), time.monotonic() + LOOK_S
    while True:
        states = [state for state in live.read_queue() if state["asked"] >= asked]
        heard = expected and expected <= {state["gateway"] for state in states}
        if heard or time.monotonic() >= give_up_at:
            return states
        time.sleep(LOOK_EVERY_S)


@dataclass(slots=True)
class RunningCommand:
    """A running command. `counts`: applied, too_late, gone, and unanswered if their gateway did not answer in time."""

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
        """Yields progress after each batch. Closed early, the command is recorded as stopped."""
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
        """As it is recorded. `ended`: "all", "stopped" or "redis_away"."""
        found = {**self.progress(), "ended": self.ended, "missing": self.found.missing}
        found |= {"order": self.order.id} if self.order.id else {}
        found |= {"error": self.error} if self.error else {}
        return {**found, "gateways": len(self.answered), "commands": self.commands}

    def _parts(self) -> Iterator[tuple[str, list[str]]]:
        """Batches, one gateway after the other. A gateway that did not answer gets no further batch."""
        for gateway, ids in self.found.by_gateway.items():
            for first in range(0, len(ids), IDS_AT_ONCE):
                if first and gateway not in self.answered:
                    break
                yield gateway, ids[first : first + IDS_AT_ONCE]

    @staticmethod
    async def _finish(part: asyncio.Future[None]) -> None:
        """Waits for the answer even if the command is stopped: a batch that was sent cannot be taken back."""
        try:
            await asyncio.shield(part)
        except asyncio.CancelledError:
            await part
            raise

    def _tell(self, gateway: str, ids: list[str]) -> None:
        """If the answer is lost the gateway may have acted: the batch counts as sent and as unanswered."""
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
