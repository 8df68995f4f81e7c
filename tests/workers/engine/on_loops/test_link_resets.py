"""Connections reset while nobody looks, and links that nobody wants: on the loop of tests and on that of engines."""

from __future__ import annotations

import asyncio
import socket
import struct
import time
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import pytest

from controller.core.kv_links import LinkState
from controller.core.steps import Seq
from tests.waiting import until_on_loop
from tests.workers.engine.kv.test_overlap import Source
from tests.workers.engine.offers import fleet_offer
from workers.engine.kv import links as kv_links
from workers.engine.kv import server as kv_server
from workers.engine.kv.links import KvLink, Links, Peer
from workers.engine.kv.server import KvServer
from workers.engine.kv.store import EmulatedKv
from workers.engine.kv.transfer import KvConnection, KvTraffic
from workers.engine.kv.wire import KvTransferError, keep_alive, read_frame, write_frame

HERE = "127.0.0.1"
STORE = EmulatedKv(layers=4, token_bytes=64)


@pytest.fixture(autouse=True)
async def unhandled() -> AsyncIterator[list[Any]]:
    """What ended a task that nobody waits for: there must be nothing."""
    found: list[Any] = []
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: found.append(context))
    yield found
    assert found == []


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_links, "PING_S", 0.2)
    monkeypatch.setattr(kv_links, "SHORTEST_PAUSE_S", 0.01)
    monkeypatch.setattr(kv_links, "LONGEST_PAUSE_S", 0.02)


def reset(writer: asyncio.StreamWriter) -> None:
    """As a process that was killed, or a firewall, ends a connection: no goodbye."""
    connection = writer.get_extra_info("socket")
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.transport.abort()


async def listening(port: int = 0) -> KvServer:
    server = KvServer(STORE, "t", {}.get, lambda seq: None)
    await server.start(HERE, port)
    return server


# ---- resets ---------------------------------------------------------------------------------------------------------


async def test_a_link_that_is_reset_between_two_pings_is_down_and_up_again(quick: None) -> None:
    server = await listening()
    link = KvLink(Peer("p", HERE, server.port), "t", announced=True)
    link.start()
    await asyncio.wait_for(link.tried.wait(), 10.0)
    assert link.health.state(time.monotonic()) is LinkState.UP
    for writer in list(server._open):
        reset(writer)
    server.close()
    await until_on_loop(lambda: link.health.state(time.monotonic()) is LinkState.DOWN)
    again = await listening(server.port)
    await until_on_loop(lambda: link.health.down_since is None)
    assert link.health.state(time.monotonic() + link.health.limits.remember_s) is LinkState.UP
    connection, new = await link.take()
    assert not new, "and one that works is kept for the first request"
    assert await connection.ping() < 5.0
    link.close()
    again.close()


async def test_whatever_happens_to_a_link_it_is_watched_on(quick: None, monkeypatch: pytest.MonkeyPatch) -> None:
    server = await listening()
    link = KvLink(Peer("p", HERE, server.port), "t", announced=True)
    opens, wrong = link.open, [ValueError("nobody thought of it")]

    async def opened() -> KvConnection:
        if wrong:
            raise wrong.pop()
        return await opens()

    monkeypatch.setattr(link, "open", opened)
    link.start()
    await asyncio.wait_for(link.tried.wait(), 10.0)
    assert "nobody thought of it" in link.health.last_error
    await until_on_loop(lambda: link.health.down_since is None)
    link.close()
    server.close()


async def test_a_receiver_that_is_reset_while_the_source_computes_is_a_failed_transfer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Noticed at the first write: what is sent is there the next time the source looks."""
    monkeypatch.setattr(kv_server, "LOOK_S", 0.1)
    source, taken = Source(), list[Seq]()
    server = KvServer(STORE, "t", {"s": source.seq}.get, taken.append, source.progress)
    await server.start(HERE, 0)
    connection = await KvConnection.open(HERE, server.port, "t", 5.0)
    write_frame(connection._writer, {"op": "take", "request": "s", "start": 0})
    await read_frame(connection._reader)
    reset(connection._writer)
    (theirs,) = server._open
    await until_on_loop(theirs.is_closing)
    source.end()
    await until_on_loop(lambda: not server._open)
    assert (server.traffic.failed, server.traffic.sent, taken) == (1, 0, [])
    server.close()


async def test_a_store_that_fails_is_a_failed_transfer_and_no_end_of_the_server() -> None:
    class Broken(EmulatedKv):
        def read(self, seq: Seq, layer: int, start: int, stop: int) -> bytes:
            raise RuntimeError("the device is out of memory")

    source = Source()
    source.end()
    server = KvServer(Broken(4, 64), "t", {"s": source.seq}.get, lambda seq: None)
    await server.start(HERE, 0)
    links = Links(STORE, "t", KvTraffic(), 5.0)
    target = Seq("t", 0.0, 64, 8, token_ids=[*range(64), 0], output_tokens=1)
    with pytest.raises(KvTransferError) as raised:
        await links.pull(fleet_offer(HERE, server.port, "s", 64), target)
    assert (raised.value.reason, server.traffic.failed) == ("cut", 1)
    links.close()
    server.close()


async def test_a_connection_that_is_closed_takes_no_word_and_says_so_as_sockets_do() -> None:
    server = await listening()
    connection = await KvConnection.open(HERE, server.port, "t", 5.0)
    reset(connection._writer)
    with pytest.raises(KvTransferError) as raised:
        await connection.ping()
    assert raised.value.reason == "cut"
    await until_on_loop(lambda: not server._open)
    with pytest.raises(OSError, match=r".+"):
        keep_alive(connection._writer)
    server.close()


# ---- links that nobody wants ----------------------------------------------------------------------------------------


def watchers() -> list[asyncio.Task[Any]]:
    return [task for task in asyncio.all_tasks() if "_watch" in repr(task.get_coro())]


async def dead_port() -> int:
    server = await asyncio.start_server(lambda reader, writer: writer.close(), HERE, 0)
    port: int = server.sockets[0].getsockname()[1]
    server.close()
    await server.wait_closed()
    return port


async def offered(links: Links, port: int) -> str:
    """Why nothing came."""
    target = Seq("t", 0.0, 4, 8, token_ids=[1, 2, 3, 4, 0], output_tokens=1)
    with pytest.raises(KvTransferError) as raised:
        await links.pull(fleet_offer(HERE, port, "r", 4), target)
    return raised.value.reason


async def test_offers_of_unannounced_engines_leave_no_link_behind_though_no_one_looks(
    quick: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    ahead = [0.0]
    monkeypatch.setattr(kv_links, "time", SimpleNamespace(monotonic=lambda: time.monotonic() + ahead[0]))
    links = Links(STORE, "t", KvTraffic(), 5.0)
    kept = await dead_port()
    links.announce([Peer("p", HERE, kept)])
    for _ in range(50):
        assert await offered(links, await dead_port()) == "unreachable"
    await until_on_loop(lambda: all(link.health.down_since is not None for link in links._links.values()))
    assert len(watchers()) > 1
    ahead[0] = kv_links.FORGOTTEN_AFTER_S + 1.0
    await until_on_loop(lambda: len(watchers()) == 1)
    assert [report.port for report in links.reports()] == [kept], "that one was announced"
    links.close()


async def test_there_are_never_many_links_that_no_one_announced(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that are up outlive those that are not."""
    monkeypatch.setattr(kv_links, "MOST_UNANNOUNCED", 3)
    server = await listening()
    links = Links(STORE, "t", KvTraffic(), 5.0)
    assert await offered(links, server.port) == "kv_lost"
    link = links._links[HERE, server.port]
    await until_on_loop(lambda: link.health.state(time.monotonic()) is LinkState.UP)
    announced = [await dead_port() for _ in range(4)]
    links.announce([Peer(f"p{port}", HERE, port) for port in announced])
    for _ in range(10):
        assert await offered(links, await dead_port()) == "unreachable"
    assert len(links._links) == 3 + len(announced)
    assert links._links[HERE, server.port] is link
    assert {(HERE, port) for port in announced} <= set(links._links)
    links.close()
    await asyncio.sleep(0)
    assert watchers() == []
    server.close()
