"""A gateway process: builds the parts on a running loop, keeps its background tasks alive, and stops them."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import aiohttp

from api.openai import status
from api.openai.gateway import Gateway, GatewayOptions
from api.openai.learned_state import LearnedFile, LearnedState
from api.openai.pruning_feed import PruningFeed
from api.openai.publisher import Audit, Publisher
from api.openai.state.graph_sets import GraphSets, GraphStore
from api.openai.state.length_forests import ForestStore, LengthForests
from api.openai.state.length_refinements import LengthRefinements
from api.openai.state.recorder import Recorder
from api.openai.state.snapshot import ConfigStore, SnapshotFile, SnapshotSource
from api.openai.state.spool import Spool
from controller.core.messages import GRAPHS, LENGTHS
from controller.core.types import StoredRecord
from controller.predict.answer_lengths import PRODUCED, VersionOutcome
from workers.http.outbound import connector
from workers.http.protocol import ConnectionBook
from workers.live import LiveState, LiveUnavailable, follow

log = logging.getLogger(__name__)

FIRST_POLL_S = 1.5  # for the first answers of engines, so that the first requests need not wait for them
RESTART_S = 1.0  # before a background task that failed is started again
END_S = 0.5  # for background tasks to end after a cancellation
END_TRIES = 4


class Store(ConfigStore, ForestStore, GraphStore, Audit, Protocol):
    """Blocking reads and writes: PostgreSQL, or a file for a gateway that runs alone."""

    def write(self, records: Sequence[StoredRecord]) -> int: ...

    def version_outcomes(self, gateway: str, what: str, outcomes: Sequence[VersionOutcome]) -> None: ...


class GatewayService:
    """`redis_url` None: nothing is published."""

    def __init__(self, options: GatewayOptions, store: Store, data_dir: Path, redis_url: str | None) -> None:
        self._options = options
        self._store = store
        self._data_dir = data_dir
        self._redis_url = redis_url
        self._tasks: list[asyncio.Task[None]] = []
        self.gateway: Gateway | None = None
        self.connections: ConnectionBook | None = None

    async def start(self) -> Gateway:
        self._session = _session()
        self._recorder = Recorder(
            self._store.write, Spool(self._data_dir / "spool" / self._options.name, self._options.records)
        )
        self._live = LiveState(self._redis_url, self._options.name) if self._redis_url else None
        gateway = self.gateway = Gateway(self._options, self._session, self._recorder, self._live)
        gateway.workflows.board = gateway.steps.board = gateway.forks.board = self._live
        gateway.instruments.watch(lambda: [*status.gauges(gateway), *self._backlog()])
        file = SnapshotFile(self._data_dir / f"{self._options.name}.snapshot.json")
        self._config = SnapshotSource(self._store, file, gateway.configure)
        gateway.config_age_s = self._config.age_s
        outcomes = partial(self._store.version_outcomes, self._options.name)
        self._forests = LengthForests(self._store, gateway.answer_lengths.take, partial(outcomes, LENGTHS))
        self._graphs = GraphSets(self._store, gateway.workflows.take, partial(outcomes, GRAPHS))
        gateway.learned_versions = lambda: [*self._forests.report(LENGTHS), *self._graphs.report(GRAPHS)]
        self._refinements = LengthRefinements(gateway.answer_lengths, gateway.runtime)
        learned = LearnedFile(self._data_dir / f"{self._options.name}.learned.json")
        self._learned = LearnedState(learned, gateway)
        self._learned.restore()
        await self._config.start()
        self._learned.restore_configured()
        await gateway.monitor.settle(FIRST_POLL_S)
        self._keep("recorder", self._recorder.run)
        self._keep("configuration", self._config.run)
        self._keep("telemetry", gateway.monitor.run)
        self._keep("length forests", self._forests.run)
        self._keep("pattern graphs", self._graphs.run)
        self._keep("length refinements", self._refinements.run)
        self._keep("learned", self._learned.run)
        if self._live is not None:
            await self._publish(gateway, self._live)
        return gateway

    async def _publish(self, gateway: Gateway, live: LiveState) -> None:
        publisher = self._publisher = Publisher(gateway, live, self._store, self._recorder.losses)
        self._keep("workflows", lambda: gateway.workflows.watch(gateway.end_workflow))
        self._keep("responses", gateway.responses.watch)
        await publisher.tick()  # before its first request it knows the shared clock and its share of the fleet
        self._keep("publisher", publisher.run)
        pruning = PruningFeed(gateway, live)
        self._keep("pruning", pruning.run)
        self._keep("commands", lambda: follow(live, publisher.command, self._config.notice, pruning.enforce))

    def close(self) -> None:
        """Refuse new requests from now on; open ones continue."""
        if self.gateway is not None:
            self.gateway.closing = True

    @property
    def busy(self) -> bool:
        return self.gateway is not None and bool(self.gateway.runtime.requests)

    def give_up(self) -> None:
        """End the requests that are still open."""
        if self.gateway is not None:
            self.gateway.runtime.give_up()

    async def stop(self) -> None:
        """End everything; records reach the database or the spool."""
        self.close()
        self.give_up()
        if self.gateway is not None:
            await self.gateway.runtime.drain(2.0)
        await _end(self._tasks)
        if self.gateway is not None:
            await self._learned.save()
            self.gateway.refused.close()
        await self._recorder.close()
        self._config.close()
        self._forests.close()
        self._graphs.close()
        self._refinements.close()
        self._learned.close()
        if self._live is not None:
            self._publisher.close()
            try:
                await self._live.leave()
            except LiveUnavailable as error:
                log.info("could not sign off from Redis: %s", error)
            await self._live.close()
        await self._session.close()

    def _redis(self) -> list[status.Gauge]:
        told = "none" if self.gateway is None else self.gateway.redis
        return [] if told == "none" else [("redis_away", "1 while Redis is unavailable.", {}, float(told == "away"))]

    def _backlog(self) -> list[status.Gauge]:
        recorder, age_s = self._recorder, self._config.age_s()
        saved_s, restored_s = self._learned.age_s(), self._learned.restored_age_s
        return [
            *self._connections(),
            ("records_buffered", "Request records in memory.", {}, recorder.waiting),
            ("refusals_grouped", "Refused requests that no record stands for yet.", {}, self._refusals_open()),
            ("records_spool_files", "Batches of records waiting on disk.", {}, recorder.spooled),
            ("records_spool_bytes", "Bytes of these batches.", {}, recorder.spool.held_bytes),
            *(
                ("records_lost_total", "Requests whose record was given up.", {"kind": kind, "full": where}, count)
                for (kind, where), count in sorted(recorder.losses.total.items())
            ),
            ("records_written_total", "Records the database took.", {}, recorder.written),
            *self._redis(),
            *self._lengths(),
            *self._pattern_graphs(),
            (
                "config_age_seconds",
                "Since the database confirmed the configuration.",
                {},
                -1 if age_s is None else age_s,
            ),
            ("learned_age_seconds", "Since what was learned was stored.", {}, -1 if saved_s is None else saved_s),
            (
                "learned_restored_age_seconds",
                "Age of what was learned before, when this process started with it.",
                {},
                -1 if restored_s is None else restored_s,
            ),
        ]

    def _lengths(self) -> list[status.Gauge]:
        lengths = None if self.gateway is None else self.gateway.answer_lengths
        if lengths is None:
            return []
        version, level = "Version of the length forest in force.", "At which its upper bound is asked, by tokens out."
        judged = "Answers that judged the upper bound of the version in force, by tokens out and if it covered them."
        gauges: list[status.Gauge] = []
        for model, each in sorted(lengths.in_force.items()):
            gauges.append(("length_version", version, {"model": model}, each.version))
            for out in PRODUCED:
                hits, about = lengths.hits(model, out), {"model": model, "tokens_out": str(out)}
                gauges += [
                    ("length_level", level, about, lengths.level(model, out)),
                    ("length_bounds", judged, about | {"covered": "yes"}, hits.covered),
                    ("length_bounds", judged, about | {"covered": "no"}, hits.answers - hits.covered),
                ]
        refused = "1 while the newest length forest of a model is not used."
        return gauges + [("length_version_refused", refused, {"model": model}, 1) for model in self._forests.refused]

    def _pattern_graphs(self) -> list[status.Gauge]:
        workflows = None if self.gateway is None else self.gateway.workflows
        if workflows is None:
            return []
        version, refused = "Version of a tenant's pattern graphs in force.", "1 while its newest ones are not used."
        matched = "Requests of workflows that were compared with pattern graphs, by whether they were like one."
        gauges: list[status.Gauge] = [
            ("graph_version", version, {"tenant": tenant}, each.version)
            for tenant, each in sorted(workflows.graphs.items())
        ]
        gauges += [("graph_version_refused", refused, {"tenant": tenant}, 1) for tenant in self._graphs.refused]
        counts = (("yes", workflows.matched), ("no", workflows.unmatched))
        return gauges + [("graph_matches_total", matched, {"matched": name}, count) for name, count in counts]

    def _refusals_open(self) -> int:
        return 0 if self.gateway is None else self.gateway.refused.waiting

    def _connections(self) -> list[status.Gauge]:
        book = self.connections
        if book is None:
            return []
        why = "Client connections that the gateway closed or refused."
        closed: list[status.Gauge] = [
            ("connections_closed_total", why, {"reason": reason}, count)
            for reason, count in sorted(book.closed.items())
        ]
        return [("open_connections", "Client connections.", {}, book.open), *closed]

    def _keep(self, name: str, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        self._tasks.append(asyncio.get_running_loop().create_task(_forever(name, work), name=name))


async def _end(tasks: Sequence[asyncio.Task[None]]) -> None:
    """Cancel, again if needed: a library that is about to time out may swallow a cancellation."""
    pending = set(tasks)
    for _ in range(END_TRIES):
        if not pending:
            return
        for task in pending:
            task.cancel()
        _, pending = await asyncio.wait(pending, timeout=END_S)
    if pending:
        log.error("still running at shutdown: %s", ", ".join(sorted(task.get_name() for task in pending)))


async def _forever(name: str, work: Callable[[], Awaitable[None]]) -> None:
    """Run a background task; one that fails is logged and started again, or the gateway would silently do without."""
    while True:
        try:
            await work()
        except Exception:
            log.exception("%s failed and is started again", name)
        await asyncio.sleep(RESTART_S)


def _session() -> aiohttp.ClientSession:
    """No limit on connections: the scheduler decides how much an engine gets. Bytes are relayed as they come."""
    checked = connector(limit=0, keepalive_timeout=3.0, ttl_dns_cache=30)
    return aiohttp.ClientSession(
        connector=checked, auto_decompress=False, cookie_jar=aiohttp.DummyCookieJar(), trust_env=False
    )
