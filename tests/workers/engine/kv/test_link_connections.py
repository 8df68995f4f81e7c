"""Connections of a link: kept ones without sockets, and what becomes of those whose peer is gone."""

from __future__ import annotations

import asyncio
import socket
import time
from unittest.mock import Mock

import pytest

from controller.core.kv_links import LinkState
from controller.core.steps import FinishReason, Seq, SeqState
from tests.waiting import until_on_loop
from tests.workers.engine.kv.test_overlap import Source
from tests.workers.engine.offers import fleet_offer
from workers.engine.kv import links as kv_links
from workers.engine.kv import server as kv_server
from workers.engine.kv.links import KEPT, KvLink, Links, Peer
from workers.engine.kv.server import KvServer
from workers.engine.kv.store import EmulatedKv
from workers.engine.kv.transfer import KvConnection, KvTraffic, Listener
from workers.engine.kv.wire import KvTransferError, read_frame, write_frame

SMALL = EmulatedKv(layers=4, token_bytes=64)


@pytest.fixture
def link() -> KvLink:
    return KvLink(Peer("p", "10.0.0.1", 9000), "token", announced=True)


def connection() -> Mock:
    return Mock(spec=KvConnection, gone=False)


async def test_a_few_are_kept_and_the_rest_are_closed(link: KvLink) -> None:
    made = [connection() for _ in range(KEPT + 1)]
    for each in made:
        link.give_back(each)
    assert [each.close.called for each in made] == [False] * KEPT + [True]
    assert await link.take() == (made[KEPT - 1], False)


def test_one_that_comes_back_after_the_link_was_forgotten_is_closed(link: KvLink) -> None:
    """A transfer was under way over it: nobody would take or close it any more."""
    late = connection()
    link.close()
    link.give_back(late)
    assert late.close.called


# ---- peers that are gone --------------------------------------------------------------------------------------------


async def served(server: KvServer) -> KvConnection:
    await server.start("127.0.0.1", 0)
    return await KvConnection.open("127.0.0.1", server.port, "t", 5.0)


def watched(writer: asyncio.StreamWriter) -> tuple[int, int]:
    connection = writer.get_extra_info("socket")
    return (
        connection.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE),
        connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE),
    )


async def test_both_ends_notice_a_peer_that_vanished_without_a_word() -> None:
    """An idle connection says nothing for hours: the system asks, at both ends."""
    server = KvServer(EmulatedKv(1, 8), "t", {}.get, lambda seq: None)
    connection = await served(server)
    (theirs,) = server._open
    for writer in (theirs, connection._writer):
        on, idle_s = watched(writer)
        assert on
        assert idle_s <= 10
    connection.close()
    server.close()


async def test_a_receiver_that_takes_everything_and_never_says_so_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_server, "TAKEN_S", 0.1)
    kept = Seq("s", 0.0, 1, 1, token_ids=[3, 4], output_tokens=1, computed=1)
    kept.state, kept.finish = SeqState.FINISHED, FinishReason.LENGTH
    taken: list[Seq] = []
    server = KvServer(EmulatedKv(1, 8), "t", {"s": kept}.get, taken.append)
    connection = await served(server)
    write_frame(connection._writer, {"op": "take", "request": "s", "start": 1})
    assert (await read_frame(connection._reader))["tokens"] == 1
    assert (await read_frame(connection._reader))["first_token"] == 4
    async with asyncio.timeout(5.0):
        while not connection.gone:
            await asyncio.sleep(0.01)
    assert (taken, server.traffic.failed) == ([], 1), "it may be pulled once more"
    connection.close()
    server.close()


@pytest.mark.parametrize("host", ["a" * 64, "no..name", "\udcff"])
async def test_a_host_that_is_no_name_leaves_its_link_down_and_watched(host: str) -> None:
    link = KvLink(Peer("p", host, 9000), "token", announced=True)
    link.start()
    await asyncio.wait_for(link.tried.wait(), 5.0)
    report = link.health.report("p", host, 9000, time.monotonic())
    assert (report.state, bool(report.last_error)) == (LinkState.DOWN, True)
    assert link._watcher is not None
    assert not link._watcher.done(), "the name may be put right"
    with pytest.raises(KvTransferError) as raised:
        await link.take()
    assert raised.value.reason == "unreachable"
    link.close()


async def test_a_link_that_looks_slow_is_measured_again_while_it_is_watched(monkeypatch: pytest.MonkeyPatch) -> None:
    """Transfers beside their prefill measure nothing: without a probe it would look slow forever."""
    monkeypatch.setattr(kv_links, "PING_S", 0.01)
    monkeypatch.setattr(kv_links, "PROBE_S", 0.02)
    server = KvServer(EmulatedKv(1, 8), "t", {}.get, lambda seq: None)
    await server.start("127.0.0.1", 0)
    link = KvLink(Peer("p", "127.0.0.1", server.port), "t", announced=True)
    link.start()
    await asyncio.wait_for(link.tried.wait(), 10.0)
    for _ in range(30):
        link.health.measured(4 << 20, 100.0)
    assert link.health.state(time.monotonic()) is LinkState.DEGRADED
    async with asyncio.timeout(20.0):
        while link.health.state(time.monotonic()) is not LinkState.UP:
            await asyncio.sleep(0.01)
    link.close()
    server.close()


# ---- probes beside transfers ----------------------------------------------------------------------------------------


@pytest.fixture
def probes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Sizes of the probes that were sent so far; they come soon after each other."""
    monkeypatch.setattr(kv_links, "PING_S", 0.01)
    monkeypatch.setattr(kv_links, "PROBE_S", 0.05)
    sent, probe = list[int](), KvConnection.probe

    async def counted(self: KvConnection, size: int) -> float:
        sent.append(size)
        return await probe(self, size)

    monkeypatch.setattr(KvConnection, "probe", counted)
    return sent


def looks_slow(link: KvLink) -> None:
    for _ in range(30):
        link.health.measured(4 << 20, 100.0)
    assert link.health.slow


async def test_a_slow_link_is_not_probed_while_a_transfer_uses_it_and_is_once_it_is_idle(probes: list[int]) -> None:
    """The transfer waits for its prefill here, as it would while it is held: it is too small to measure anything."""
    source = Source()
    server = KvServer(SMALL, "t", {"s": source.seq}.get, lambda seq: None, source.progress)
    await server.start("127.0.0.1", 0)
    links = Links(SMALL, "t", KvTraffic(), 30.0)
    links.announce([Peer("p", "127.0.0.1", server.port)])
    await links.tried(10.0)
    (link,) = links.up()
    target = Seq("t", 0.0, 64, 8, token_ids=[*range(64), 0], output_tokens=1)
    began = asyncio.Event()

    async def begun() -> None:
        began.set()

    offer = fleet_offer("127.0.0.1", server.port, "s", 64)
    pulling = asyncio.ensure_future(links.pull(offer, target, Listener(began=begun)))
    await asyncio.wait_for(began.wait(), 10.0)
    looks_slow(link)
    before, pings = len(probes), link.health.latency_s
    await asyncio.sleep(0.5)
    assert (len(probes), pulling.done()) == (before, False)
    assert link.health.latency_s != pings, "it is pinged all the same"
    source.end()
    await asyncio.wait_for(pulling, 10.0)
    await until_on_loop(lambda: link.health.state(time.monotonic()) is LinkState.UP)
    assert len(probes) > before
    links.close()
    server.close()


async def test_a_link_that_transfers_have_just_measured_is_probed_a_period_later(
    probes: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kv_links, "PROBE_S", 0.5)
    server = KvServer(EmulatedKv(1, 8), "t", {}.get, lambda seq: None)
    await server.start("127.0.0.1", 0)
    link = KvLink(Peer("p", "127.0.0.1", server.port), "t", announced=True)
    link.start()
    await asyncio.wait_for(link.tried.wait(), 10.0)
    before = len(probes)
    looks_slow(link)
    for _ in range(100):  # four periods
        link.health.moved(1 << 20, 25.0)
        await asyncio.sleep(0.02)
    busy = len(probes) - before
    await until_on_loop(lambda: len(probes) - before > busy)
    assert busy <= 1, "a busy machine may sleep for a period"
    link.close()
    server.close()
