"""Telemetry of the engines. One gateway, by lease, polls and publishes; the others read what it published.

Without Redis, each gateway polls for itself. A gateway probes an instance itself whenever a call to it failed. What
engines report of their links is passed to the migrator when it is new.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from api.openai.state.fleet import GatewayFleet, Seat
from controller.core.events import LinkSeen
from controller.core.kv_links import INT64, LinkReport, report_from_json
from controller.core.staleness import STALE_PERIODS
from controller.core.types import Load, Role
from workers.backends.base import EngineError
from workers.live import LiveUnavailable
from workers.shared_clock import SharedClock

log = logging.getLogger(__name__)

LEASE = "telemetry"
LINKS = "links"  # beside the fields of a published load
NEWS = 0.2  # a bandwidth that changed by a smaller share is no news


class TelemetryBoard(Protocol):
    """Where the leader publishes. Every call ends soon; with Redis unavailable it raises LiveUnavailable."""

    async def lease(self, what: str, ttl_s: float) -> bool: ...

    async def publish_telemetry(self, loads: dict[str, dict[str, Any]], ttl_s: float) -> None: ...

    async def read_telemetry(self, instance_ids: list[str]) -> dict[str, dict[str, Any]]: ...


class Monitor:
    """`period_s`: 0.05 to 5 seconds. Without a board it polls for itself alone."""

    def __init__(
        self,
        fleet: GatewayFleet,
        board: TelemetryBoard | None,
        clock: Callable[[], float],
        shared: SharedClock | None = None,
    ) -> None:
        self.period_s = 1.0
        self.leading = board is None
        self._fleet = fleet
        self._board = board
        self._clock = clock
        self._shared = shared or SharedClock(clock)
        self._polling: set[str] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._published: dict[str, dict[str, Any]] = {}
        self._links = LinkWatch(self._tell)

    async def run(self) -> None:
        while True:
            started = self._clock()
            await self.round()
            await asyncio.sleep(max(0.0, self.period_s - (self._clock() - started)))

    async def round(self) -> None:
        """Start this period's polls, or read the leader's results. A slow engine does not delay the polls of others."""
        self._fleet.sweep()
        self._links.keep([name for name, seat in self._fleet.seats.items() if seat.up])
        fresh = await self._read_leader()
        for instance_id in self._fleet.seats:
            if instance_id not in fresh:
                self.probe(instance_id)

    async def settle(self, timeout_s: float) -> None:
        """Wait for the polls under way, at start."""
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=timeout_s)

    def probe(self, instance_id: str) -> None:
        """Poll now, unless a poll is under way."""
        if instance_id not in self._polling and instance_id in self._fleet.seats:
            self._polling.add(instance_id)
            task = asyncio.get_running_loop().create_task(self._poll(instance_id))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _poll(self, instance_id: str) -> None:
        try:
            seat = self._fleet.seats[instance_id]
            load = readable(await seat.backend.telemetry(self._clock()))
            self._fleet.reported(instance_id, load)  # at once, since reading links may take longer
            published = self._published[instance_id] = load._asdict() | {"observed_at": self._shared.now()}
            reports = await self._read_links(seat)
            self._links.reported(instance_id, reports)
            if reports:
                published[LINKS] = [report._asdict() for report in reports]
        except EngineError as error:
            self._published.pop(instance_id, None)
            self._fleet.silent(instance_id, error)
        except (ArithmeticError, ValueError, IndexError) as error:  # not a metrics page
            self._fleet.silent(instance_id, EngineError(f"instance {instance_id} sent unreadable telemetry: {error}"))
        finally:
            self._polling.discard(instance_id)

    def _tell(self, seen: LinkSeen) -> None:
        self._fleet.runtime.push(seen)

    async def _read_links(self, seat: Seat) -> Sequence[LinkReport]:
        """Reports of an engine that transfers KV and keeps links. A failure here does not make it silent."""
        if seat.spec.role is Role.COLLOCATED or not seat.backend.capabilities.links:
            return ()
        try:
            return await seat.backend.links()
        except EngineError as error:
            log.info("no news of the links of %s: %s", seat.spec.id, error)
            return ()

    # ---- leader and readers ---------------------------------------------------------------------------------------

    async def _read_leader(self) -> set[str]:
        """Instances whose newest published load was used; empty for the leader, which publishes here instead."""
        if self._board is None:
            return set()
        ttl_s = STALE_PERIODS * self.period_s
        try:
            self.leading = await self._board.lease(LEASE, ttl_s)
            if self.leading:
                self._published = {name: load for name, load in self._published.items() if name in self._fleet.seats}
                await self._board.publish_telemetry(dict(self._published), ttl_s)
                return set()
            return self._take(await self._board.read_telemetry(list(self._fleet.seats)))
        except LiveUnavailable:
            self.leading = False
            return set()
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            log.info("telemetry in Redis cannot be read: %r", error)
            return set()

    def _take(self, published: dict[str, dict[str, Any]]) -> set[str]:
        now, shared = self._clock(), self._shared.now()
        taken = set()
        for instance_id, fields in published.items():
            try:
                age_s = max(0.0, shared - fields["observed_at"])
                told = {name: value for name, value in fields.items() if name != LINKS}
                load = readable(Load(**told | {"observed_at": now - age_s}))
                reports = [report_from_json(each) for each in fields.get(LINKS, ())]
            except (AttributeError, KeyError, TypeError, ValueError) as error:
                # Of a gateway of another version, during an upgrade: this one then polls the engine itself.
                log.info("telemetry of %s in Redis cannot be read: %r", instance_id, error)
                continue
            if age_s <= STALE_PERIODS * self.period_s:  # else the leader lost it: this gateway polls it itself
                self._fleet.reported(instance_id, load)
                self._links.reported(instance_id, reports)
                taken.add(instance_id)
        return taken


NOT_ALWAYS = frozenset({"kv_capacity_tokens", "max_num_seqs"})  # figures that some engines do not report


def readable(load: Load) -> Load:
    """The same load. Raises ValueError, for any engine, where a figure is none that can be counted with: negative, not
    finite, or larger than JSON and the database take; or where one is missing that every engine has."""
    for name, value in load._asdict().items():
        if value is None and name in NOT_ALWAYS:
            continue
        if not isinstance(value, (int, float)) or not 0 <= value < INT64:
            raise ValueError(f"{name} is {str(value)[:30]}")
    return load


class LinkWatch:
    """`tell` reaches the migrator. Reports without a peer's name (the engine got no order yet) are left out."""

    def __init__(self, tell: Callable[[LinkSeen], None]) -> None:
        self._tell = tell
        self._told: dict[tuple[str, str], LinkSeen] = {}
        self._there: set[str] = set()

    def reported(self, instance_id: str, reports: Sequence[LinkReport]) -> None:
        """Reports of the engine that pulls over these links. Links to a peer that is gone are left out."""
        for report in reports:
            if not report.peer or (self._there and report.peer not in self._there):
                continue
            seen = LinkSeen(report.peer, instance_id, report.state, report.bandwidth_bytes_s, report.latency_s)
            before = self._told.get((seen.source, seen.target))
            if before is None or _news(before, seen):
                self._told[seen.source, seen.target] = seen
                self._tell(seen)

    def keep(self, instance_ids: Sequence[str]) -> None:
        """Which instances are up now. The migrator forgets the links of those that left, so they are news again."""
        there = set(instance_ids)
        left, self._there = self._there - there, there
        self._told = {pair: seen for pair, seen in self._told.items() if left.isdisjoint(pair)}


def _news(before: LinkSeen, after: LinkSeen) -> bool:
    if before.state is not after.state:
        return True
    old, new = before.bandwidth_bytes_s, after.bandwidth_bytes_s
    return (old is None) != (new is None) or (old and new and not math.isclose(old, new, rel_tol=NEWS)) or False
