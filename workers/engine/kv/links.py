"""Links to the engines from which this one may pull KV: opened when they are announced, measured, watched, reconnected.

As in HyperFlexis' TransferLink Manager, links are created when an instance joins, so that no request waits for them.
Each link has a watched connection (one ping a second; bandwidth from a probe at first, then from transfers) and a few
idle connections for pulls. It is not probed while a transfer uses it, or is held there. A pull from an engine that was
not announced creates its link, if an engine of the fleet made its offer; such a link is removed when it stays down.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from typing import Any

from controller.core.kv_links import OTHER_MODEL, KvMoved, LinkReport, LinkState
from controller.core.steps import Seq
from workers.engine.kv.link_health import LinkHealth
from workers.engine.kv.store import KvStore
from workers.engine.kv.transfer import NOBODY, KvConnection, KvTraffic, Listener, Offer, Pulled
from workers.engine.kv.wire import KvTransferError, as_transfer_errors

PING_S = 1.0
CONNECT_S = 2.0
PROBE_BYTES = 4 << 20
PROBE_S = 5.0  # from a measurement to the probe of a link that is slow, or whose transfers do not measure bandwidth
SHORTEST_PAUSE_S, LONGEST_PAUSE_S = 0.1, 2.0  # between two attempts to connect
KEPT = 4  # idle connections of a link
FORGOTTEN_AFTER_S = 60.0  # a link that was not announced is removed after being down this long
# Limit of links that were not announced: engines that are gone are among them.
MOST_UNANNOUNCED = 64
WORST_FIRST = (LinkState.DOWN, LinkState.CONNECTING, LinkState.DEGRADED, LinkState.UP)
LONGEST_PREFILL_S = 600.0  # the longest wait for a source that still computes; longer than any gateway waits
NOT_THE_LINKS_FAULT = ("refused", "kv_lost", OTHER_MODEL)
log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Peer:
    """An engine: its instance id ("" if unknown), and the address from which its KV is pulled."""

    id: str
    host: str
    port: int


class KvLink:
    """A link from one peer to this engine. `unwanted` is called once, if the link was not announced and stayed down; it
    is then no longer watched."""

    def __init__(self, peer: Peer, token: str, *, announced: bool, unwanted: Callable[[], None] = lambda: None) -> None:
        self.peer = peer
        self.announced = announced
        self.health = LinkHealth()
        self.tried = asyncio.Event()  # set after the first attempt to connect
        self._token = token
        self._unwanted = unwanted
        self._idle: list[KvConnection] = []
        self._watcher: asyncio.Task[None] | None = None
        self._closed = False
        self._transfers = 0  # that use it now

    def start(self) -> None:
        self._watcher = asyncio.get_running_loop().create_task(self._watch())

    def close(self) -> None:
        self._closed = True
        if self._watcher is not None:
            self._watcher.cancel()
        for connection in self._idle:
            connection.close()
        self._idle.clear()

    # ---- for transfers ---------------------------------------------------------------------------------------------

    async def take(self) -> tuple[KvConnection, bool]:
        """A connection, and whether it is new. Raises KvTransferError."""
        while self._idle:
            connection = self._idle.pop()
            if not connection.gone:
                return connection, False
            connection.close()
        return await self.open(), True

    async def open(self) -> KvConnection:
        return await KvConnection.open(self.peer.host, self.peer.port, self._token, CONNECT_S)

    @contextmanager
    def moving(self) -> Iterator[None]:
        """While a transfer uses the link, or waits or is held there: a probe would take bandwidth from it."""
        self._transfers += 1
        try:
            yield
        finally:
            self._transfers -= 1

    def give_back(self, connection: KvConnection) -> None:
        if len(self._idle) < KEPT and not self._closed:
            self._idle.append(connection)
        else:
            connection.close()

    # ---- watching --------------------------------------------------------------------------------------------------

    async def _watch(self) -> None:
        """Keep the link connected. Handles any error, since a link without a watcher would keep its last state."""
        pause_s = SHORTEST_PAUSE_S
        while True:
            try:
                control = await self.open()
                pause_s = SHORTEST_PAUSE_S
                try:
                    await self._use(control)
                finally:
                    control.close()
            except KvTransferError as error:
                self._lost(str(error))
            except Exception as error:
                self._lost(f"{type(error).__name__}: {error}", defect=error)
            if self._stayed_down:
                self._unwanted()
                return
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S)

    def _lost(self, why: str, defect: Exception | None = None) -> None:
        if self.health.down_since is None:
            at = (self.peer.id, self.peer.host, self.peer.port)
            log.warning("link from %s at %s:%d: %s", *at, why, exc_info=defect)
        self.health.lost(why, time.monotonic())
        self.tried.set()

    @property
    def _stayed_down(self) -> bool:
        down_since = self.health.down_since
        return not self.announced and down_since is not None and time.monotonic() - down_since > FORGOTTEN_AFTER_S

    async def _use(self, control: KvConnection) -> None:
        """Ping and probe the connection until it breaks. Raises KvTransferError."""
        await self._probe(control)
        self.health.answered(await control.ping())
        for gone in [connection for connection in self._idle if connection.gone]:
            self._idle.remove(gone)
            gone.close()
        if not self._idle:
            self.give_back(await self.open())  # so that the first request has an open connection
        self.health.connected()
        self.tried.set()
        measurements, measured_at = self.health.measurements, time.monotonic()
        while True:
            await asyncio.sleep(PING_S)
            self.health.answered(await control.ping())
            if self.health.measurements != measurements:
                measurements, measured_at = self.health.measurements, time.monotonic()
            if time.monotonic() - measured_at >= PROBE_S:
                await self._probe(control)

    async def _probe(self, control: KvConnection) -> None:
        """Measure the link if nothing else does. Raises KvTransferError."""
        if self.health.wants_probe and not self._transfers:
            self.health.measured(PROBE_BYTES, await control.probe(PROBE_BYTES))


class Links:
    """All links of one engine. `me`: its instance id, once announced."""

    def __init__(
        self,
        store: KvStore,
        token: str,
        traffic: KvTraffic,
        timeout_s: float,
        about: Callable[[Seq], Mapping[str, Any]] = lambda seq: {},
    ) -> None:
        """`about`: what a source is told of a transfer besides (`KvConnection.pull`)."""
        self._about = about
        self.me = ""
        self._store = store
        self._token = token
        self._traffic = traffic
        self._timeout_s = timeout_s
        self._links: dict[tuple[str, int], KvLink] = {}

    def announce(self, peers: Iterable[Peer]) -> None:
        """Keep links to exactly these peers. Existing links to them are not changed."""
        wanted = {(peer.host, peer.port): peer for peer in peers}
        for at, link in list(self._links.items()):
            if at not in wanted and link.announced:
                self._forget(at)
        for at, peer in wanted.items():
            link = self._links.get(at) or self._make(peer, announced=True)
            link.peer, link.announced = peer, True

    async def tried(self, within_s: float) -> None:
        """Return when each link was tried once, or after `within_s`."""
        with suppress(TimeoutError):
            async with asyncio.timeout(within_s):
                for link in list(self._links.values()):
                    await link.tried.wait()

    def reports(self) -> list[LinkReport]:
        now = time.monotonic()
        links = sorted(self._links.values(), key=lambda link: (link.peer.id, link.peer.host, link.peer.port))
        return [link.health.report(link.peer.id, link.peer.host, link.peer.port, now) for link in links]

    def close(self) -> None:
        for at in list(self._links):
            self._forget(at)

    def up(self) -> list[KvLink]:
        """The links to announced peers that answer and are as fast as usual."""
        now = time.monotonic()
        return [each for each in self._links.values() if each.announced and each.health.state(now) is LinkState.UP]

    async def pull(self, offer: Offer, seq: Seq, listener: Listener = NOBODY) -> tuple[KvMoved, int]:
        """Pull the KV of the prompt into the blocks of `seq`. Returns the figures of the transfer and the token that
        the prefill sampled.

        Raises KvTransferError, whose `moved` has the figures until then. The timeout restarts while the source
        reports that it still computes, for at most LONGEST_PREFILL_S."""
        link = self._links.get((offer.host, offer.port))
        if link is None and not offer.of_the_fleet(self._token):
            self._traffic.failed += 1
            raise KvTransferError(f"{offer.host}:{offer.port} is not the address of an engine of the fleet", "refused")
        if link is None:
            link = self._make(Peer(offer.engine, offer.host, offer.port), announced=False)
        began = time.monotonic()
        transfer = _Transfer(link, offer, seq, self._about(seq))
        try:
            with link.moving(), as_transfer_errors(f"KV of {offer.request}", "unreachable"):
                async with asyncio.timeout(self._timeout_s) as limit:
                    loop = asyncio.get_running_loop()
                    at_last = loop.time() + LONGEST_PREFILL_S

                    def still() -> None:
                        limit.reschedule(min(loop.time() + self._timeout_s, at_last))
                        listener.still()

                    pulled = await transfer.run(self._store, self._traffic, replace(listener, still=still))
        except KvTransferError as error:
            error.moved = self._moved(transfer, seq, began, error.reason)
            self._traffic.failed += 1
            if error.reason not in NOT_THE_LINKS_FAULT:
                link.health.failed(str(error), time.monotonic(), error.moved.bytes)
            raise
        early, waited_s = pulled.early_bytes, pulled.waited_s
        moved = self._moved(transfer, seq, began)
        moved = moved._replace(early_bytes=early, waited_s=waited_s, **pulled.came._asdict(), **pulled.held)
        # A transfer at the pace of its prefill does not measure the bandwidth, nor does the time in which it is held.
        link.health.moved(moved.bytes, 0.0 if early else moved.moving_s)
        self._traffic.received += 1
        self._traffic.receiving_s += moved.moving_s
        return moved, pulled.first_token

    def _moved(self, transfer: _Transfer, seq: Seq, began: float, reason: str = "") -> KvMoved:
        a_layer = max(1, (transfer.offer.tokens - seq.cached) * self._store.token_bytes)
        return KvMoved(
            bytes=transfer.received,
            layers=transfer.received // a_layer if reason else self._store.layers,
            tokens=transfer.offer.tokens - seq.cached,
            cached=seq.cached,
            seconds=time.monotonic() - began,
            reserved=True,
            reason=reason,
        )

    def _make(self, peer: Peer, *, announced: bool) -> KvLink:
        if not announced:
            self._make_room()
        at = peer.host, peer.port
        link = KvLink(peer, self._token, announced=announced, unwanted=lambda: self._forget(at))
        self._links[at] = link
        link.start()
        return link

    def _make_room(self) -> None:
        """Remove the worst link that was not announced if there are too many. A pull in progress over it continues."""
        now = time.monotonic()
        unannounced = [(at, link.health.state(now)) for at, link in self._links.items() if not link.announced]
        if len(unannounced) >= MOST_UNANNOUNCED:
            worst, _ = min(unannounced, key=lambda each: WORST_FIRST.index(each[1]))  # the oldest of equally bad ones
            self._forget(worst)

    def _forget(self, at: tuple[str, int]) -> None:
        self._links.pop(at).close()


class _Transfer:
    """One pull: over an idle connection if there is one, and again over a new one if that connection was broken."""

    def __init__(self, link: KvLink, offer: Offer, seq: Seq, about: Mapping[str, Any]) -> None:
        self._link = link
        self._about = about
        self.offer = offer
        self._seq = seq
        self._connection: KvConnection | None = None

    @property
    def received(self) -> int:
        return self._connection.received if self._connection is not None else 0

    async def run(self, store: KvStore, traffic: KvTraffic, listener: Listener) -> Pulled:
        self._connection, new = await self._link.take()
        try:
            pulled = await self._over(self._connection, store, traffic, listener)
        except KvTransferError as error:
            if new or self._connection.received or error.reason not in ("cut", "unreachable"):
                raise
            self._connection = await self._link.open()
            pulled = await self._over(self._connection, store, traffic, listener)
        self._link.give_back(self._connection)
        return pulled

    async def _over(self, connection: KvConnection, store: KvStore, traffic: KvTraffic, listener: Listener) -> Pulled:
        try:
            return await connection.pull(self.offer, self._seq, store, traffic, listener, self._about)
        except BaseException:
            connection.close()
            raise
