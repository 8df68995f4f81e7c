"""Lines that arrive together are read together, and many messages at once cost one call of the kernel."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from tests.waiting import until_on_loop
from tests.workers.flowd.running import MB, WAIT_S, connected, serving
from workers.flowd import client as flow_client
from workers.flowd import daemon as flow_daemon
from workers.flowd.lines import line_batches
from workers.small_json import loads


def stream(*chunks: bytes) -> asyncio.StreamReader:
    reader = asyncio.StreamReader()
    for chunk in chunks:
        reader.feed_data(chunk)
    reader.feed_eof()
    return reader


async def read(reader: asyncio.StreamReader, most: int = 100) -> list[list[bytes]]:
    return [lines async for lines in line_batches(reader, most)]


async def test_lines_that_have_arrived_come_together():
    assert await read(stream(b"a\nbc\n\nd\n")) == [[b"a", b"bc", b"", b"d"]]


async def test_a_line_in_pieces_is_one_line():
    reader = asyncio.StreamReader()
    batches = line_batches(reader, 100)
    reader.feed_data(b"a\nb")
    assert await anext(batches) == [b"a"]
    reader.feed_data(b"c")
    waiting = asyncio.ensure_future(anext(batches))
    await asyncio.sleep(0)
    assert not waiting.done()
    reader.feed_data(b"d\ne")
    assert await waiting == [b"bcd"]
    reader.feed_eof()
    assert await anext(batches) == [b"e"]
    assert await anext(batches, None) is None


@pytest.mark.parametrize("sent", [b"x" * 101, b"a\n" + b"x" * 101 + b"\nb\n"])
async def test_a_line_that_is_too_long_is_refused(sent):
    with pytest.raises(ValueError, match="100 bytes"):
        await read(stream(sent))
    assert await read(stream(b"x" * 100 + b"\n")) == [[b"x" * 100]]


async def test_what_is_said_at_once_is_written_at_once(path, monkeypatch):
    """Beside what the daemon says of itself: its policy at first, and by the clock that it is alive, which on a busy
    machine come in between. Nobody is promoted, since all have much time."""
    written: list[list[str]] = []
    write = asyncio.StreamWriter.write

    def noted(self: Any, data: bytes) -> None:
        said = [message.get("op") or message["event"] for message in map(loads, data.splitlines())]
        if said not in (["alive"], ["policy"]):
            written.append(said)
        write(self, data)

    monkeypatch.setattr(flow_daemon, "ALIVE_S", 0.001)
    monkeypatch.setattr(flow_client, "SILENCE_S", WAIT_S)
    async with serving(path) as daemon, connected(path) as client:
        monkeypatch.setattr(asyncio.StreamWriter, "write", noted)
        flows = [client.submit(3, MB, "host", 1000.0) for _ in range(20)]
        async with asyncio.timeout(WAIT_S):
            for flow in flows:
                await flow.answered()
        assert written == [["submit"] * 20, ["permit"] * 20]
        written.clear()
        for flow in flows:
            flow.end()
        await until_on_loop(lambda: not daemon.status()["flows"], WAIT_S)
        assert written == [["completion"] * 20]


async def test_what_was_said_last_is_sent_when_the_client_is_closed(path):
    async with serving(path) as daemon:
        async with connected(path) as client:
            flow = client.submit(3, MB, "host", 1.0)
            await flow.answered()
            flow.end()
        async with asyncio.timeout(20.0):
            while not (ended := daemon.report("h")["flows"]) or ended[0]["end"] == "":
                await asyncio.sleep(0.01)
        assert ended[0]["end"] == "given up", "not lost with its connection"
