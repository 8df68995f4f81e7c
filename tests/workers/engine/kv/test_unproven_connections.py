"""The KV listener against whoever else is on the network of engines: connections without a greeting, and log lines."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator

import pytest

from workers.engine.kv.server import KvServer
from workers.engine.kv.store import EmulatedKv
from workers.engine.kv.transfer import KvConnection
from workers.engine.kv.unproven_connections import MOST, MOST_FROM_ADDRESS

OPENED = 120  # from each address
ADDRESSES = ("127.0.0.1", "127.0.0.2", "127.0.0.3", "127.0.0.4", "127.0.0.5")


@pytest.fixture
async def server() -> AsyncIterator[KvServer]:
    server = KvServer(EmulatedKv(1, 8), "t", {}.get, lambda seq: None)
    await server.start("127.0.0.1", 0)
    yield server
    server.close()


async def silent(server: KvServer, address: str) -> asyncio.StreamWriter:
    _, writer = await asyncio.open_connection("127.0.0.1", server.port, local_addr=(address, 0))
    return writer


async def test_connections_that_never_greet_are_few_and_keep_no_engine_out(server: KvServer) -> None:
    held = [await silent(server, address) for address in ADDRESSES for _ in range(OPENED)]
    await asyncio.sleep(0.1)
    assert MOST_FROM_ADDRESS < len(server.unproven) <= MOST
    assert len(server._open) <= MOST
    connection = await KvConnection.open("127.0.0.1", server.port, "t", 5.0)
    assert len(server.unproven) < MOST, "it is known now, and counts no more"
    assert not connection.gone
    connection.close()
    for writer in held:
        writer.transport.abort()


async def test_one_address_gets_its_share_and_no_more(server: KvServer) -> None:
    held = [await silent(server, "127.0.0.2") for _ in range(OPENED)]
    await asyncio.sleep(0.1)
    assert len(server._open) == len(server.unproven) == MOST_FROM_ADDRESS
    for writer in held:
        writer.transport.abort()
    await asyncio.sleep(0.1)
    assert len(server.unproven) == 0


async def test_those_that_are_no_engines_are_logged_once_a_second(
    server: KvServer, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        for _ in range(50):
            writer = await silent(server, "127.0.0.1")
            writer.write(b"\xff" * 64)
            await writer.drain()
            writer.close()
        await asyncio.sleep(0.1)
    assert 1 <= len(caplog.records) <= 5
    assert server.traffic.failed == 50, "counted all the same"
