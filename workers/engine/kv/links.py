"""Kept links to the engines this one may pull KV from: opened when it is told of them, measured, watched, reopened.

HyperFlexis' TransferLink Manager creates links when an instance joins, so that no request pays for it. Here each link
is a watched connection (a ping a second, bandwidth by a probe and then by what moves) and a few kept ones for pulls.
A pull from an engine nobody announced makes its link on the way; such a link is forgotten once it stays down.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, replace

from controller.core.kv_links import OTHER_MODEL, KvMoved, LinkReport, LinkState
from controller.core.steps import Seq
from controller.engine.link_health import LinkHealth
from workers.engine.kv.store import KvStore
from workers.engine.kv.transfer import NOBODY, KvConnection, KvTraffic, Listener, Offer, Pulled, as_transfer_errors
from workers.engine.kv.wire import KvTransferError

PING_S = 1.0
CONNECT_S = 2.0
PROBE_BYTES = 4 << 20
PROBE_S = 5.0  # between two probes of a link that is used by transfers which do not measure it, or has become slow
SHORTEST_PAUSE_S, LONGEST_PAUSE_S = 0.1, 2.0  # between two tries to connect
KEPT = 4  # idle connections of a link
FORGOTTEN_AFTER_S = 60.0  # down, of a link that nobody announced
MOST_STRANGERS = 64  # links that nobody announced: whoever reaches the engine can make it try any address
WORST_FIRST = (LinkState.DOWN, LinkState.CONNECTING, LinkState.DEGRADED, LinkState.UP)
LONGEST_PREFILL_S = 600.0  # that a pull waits for a source that says it computes: longer than any gateway would
NOT_THE_LINKS_FAULT = ("refused", "kv_lost", OTHER_MODEL)
log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Peer:
    """An engine's instance id ("" where nobody told it), and where its KV is pulled from."""

    id: str
    host: str
    port: int


class KvLink:
    """From one peer to this engine. `unwanted` is called once, by its watcher, where nobody announced it and it stayed
    down: it is watched no more."""

    def __init__(self, peer: Peer, token: str, *, announced: bool, unwanted: Callable[[], None] = lambda: None) -> None:
        self.peer = peer
        self.announced = announced
        self.health = LinkHealth()
        self.tried = asyncio.Event()  # the first try to connect is over
        self._token = token
        self._unwanted = unwanted
        self._idle: list[KvConnection] = []
        self._watcher: asyncio.Task[None] | None = None
        self._closed = False

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
        """A connection, and whether it was opened just now. Raises KvTransferError."""
        while self._idle:
            connection = self._idle.pop()
            if not connection.gone:
                return connection, False
            connection.close()
        return await self.open(), True

    async def open(self) -> KvConnection:
        return await KvConnection.open(self.peer.host, self.peer.port, self._token, CONNECT_S)

    def give_back(self, connection: KvConnection) -> None:
        if len(self._idle) < KEPT and not self._closed:
            self._idle.append(connection)
        else:
            connection.close()

    # ---- watching --------------------------------------------------------------------------------------------------

    async def _watch(self) -> None:
        """Whatever happens on the way: a link that is watched no more would keep the state it was last seen in."""
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
        """Until it breaks."""
        if self.health.wants_probe:
            self.health.measured(PROBE_BYTES, await control.probe(PROBE_BYTES))
        self.health.answered(await control.ping())
        for gone in [connection for connection in self._idle if connection.gone]:
            self._idle.remove(gone)
            gone.close()
        if not self._idle:
            self.give_back(await self.open())  # the first request finds it open
        self.health.connected()
        self.tried.set()
        probed_at = time.monotonic()
        while True:
            await asyncio.sleep(PING_S)
            self.health.answered(await control.ping())
            if self.health.wants_probe and time.monotonic() - probed_at >= PROBE_S:
                probed_at = time.monotonic()
                self.health.measured(PROBE_BYTES, await control.probe(PROBE_BYTES))


class Links:
    """All links of one engine. `me`: its instance's id, once somebody told."""

    def __init__(self, store: KvStore, token: str, traffic: KvTraffic, timeout_s: float) -> None:
        self.me = ""
        self._store = store
        self._token = token
        self._traffic = traffic
        self._timeout_s = timeout_s
        self._links: dict[tuple[str, int], KvLink] = {}

    def announce(self, peers: Iterable[Peer]) -> None:
        """These and no others are to be linked; links that stay are not touched."""
        wanted = {(peer.host, peer.port): peer for peer in peers}
        for at, link in list(self._links.items()):
            if at not in wanted and link.announced:
                self._forget(at)
        for at, peer in wanted.items():
            link = self._links.get(at) or self._make(peer, announced=True)
            link.peer, link.announced = peer, True

    async def tried(self, within_s: float) -> None:
        """Return when each link was tried once, or after that time."""
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

    async def pull(self, offer: Offer, seq: Seq, listener: Listener = NOBODY) -> tuple[KvMoved, int]:
        """Bring the KV of the prompt into the blocks of `seq`; how it went, and the token that its prefill sampled.

        Raises KvTransferError with what had come. The time-out counts from when the source computes no more, which it
        may do for LONGEST_PREFILL_S."""
        link = self._links.get((offer.host, offer.port))
        if link is None:
            link = self._make(Peer(offer.engine, offer.host, offer.port), announced=False)
        began = time.monotonic()
        transfer = _Transfer(link, offer, seq)
        try:
            with as_transfer_errors(f"KV of {offer.request}", "unreachable"):
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
        moved = self._moved(transfer, seq, began)._replace(early_bytes=early, waited_s=waited_s)
        link.health.moved(moved.bytes, 0.0 if early else moved.seconds)  # at its prefill's pace it tells no bandwidth
        self._traffic.received += 1
        self._traffic.receiving_s += moved.seconds
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
        """For one more that nobody announced. A pull under way over one that is forgotten goes on."""
        now = time.monotonic()
        strangers = [(at, link.health.state(now)) for at, link in self._links.items() if not link.announced]
        if len(strangers) >= MOST_STRANGERS:
            worst, _ = min(strangers, key=lambda each: WORST_FIRST.index(each[1]))  # of equals the oldest
            self._forget(worst)

    def _forget(self, at: tuple[str, int]) -> None:
        self._links.pop(at).close()


class _Transfer:
    """One pull: over a kept connection where there is one, and once more over a new one if that turns out dead."""

    def __init__(self, link: KvLink, offer: Offer, seq: Seq) -> None:
        self._link = link
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
            return await connection.pull(self.offer, self._seq, store, traffic, listener)
        except BaseException:
            connection.close()
            raise
