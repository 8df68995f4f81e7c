"""A wire between two engines that a test may cut, or have it damage what it carries.

It listens at another loopback address, on the engine's own port."""

from __future__ import annotations

import asyncio
import os
from contextlib import suppress
from typing import Self

# Advertise this host, listen on 127.0.0.1: what comes here goes there. Each process of tests has an address of its own,
# which no test connects from either: the engine's port is always free there.
ELSEWHERE = f"127.0.2.{1 + int(os.environ.get('PYTEST_XDIST_WORKER', 'gw0').removeprefix('gw'))}"


class Wire:
    """`async with Wire(port) as wire`: from ELSEWHERE:port to 127.0.0.1:port.

    `cut`: the first connection that from now on carries more bytes than that from the engine is reset there, once.
    `flip`: of the first one that carries that many, the last bit of the next byte is turned over, once.
    `hold`: the first one that carries that many carries no more until `go`.
    """

    def __init__(self, port: int) -> None:
        self.port = port
        self.cuts = self.flips = self.held = 0
        self._hold_after: int | None = None
        self._going = asyncio.Event()
        self._cut_after: int | None = None
        self._flip_after: int | None = None
        self._carried: dict[asyncio.StreamWriter, int] = {}  # bytes from the engine since `cut`, by connection
        self._server: asyncio.Server | None = None
        self._open: set[asyncio.StreamWriter] = set()

    async def __aenter__(self) -> Self:
        await self.mend()
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.sever()

    def cut(self, after: int) -> None:
        self._cut_after = after
        self._carried.clear()

    def flip(self, after: int) -> None:
        self._flip_after = after
        self._carried.clear()

    def hold(self, after: int) -> None:
        self._hold_after = after
        self._going.clear()
        self._carried.clear()

    def go(self) -> None:
        self._going.set()

    async def mend(self) -> None:
        self._server = await asyncio.start_server(self._carry, ELSEWHERE, self.port)

    async def sever(self) -> None:
        """Nothing gets through any more, and what was open is closed."""
        if self._server is not None:
            self._server.close()
        for writer in list(self._open):
            writer.transport.abort()
        await asyncio.sleep(0)

    async def _carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there_reader, there_writer = await asyncio.open_connection("127.0.0.1", self.port)
        self._open |= {writer, there_writer}
        ways = (self._copy(reader, there_writer), self._answers(there_reader, writer))
        await asyncio.wait([asyncio.ensure_future(way) for way in ways], return_when=asyncio.FIRST_COMPLETED)
        for end in (writer, there_writer):
            self._open.discard(end)
            end.transport.abort()

    async def _copy(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(OSError):
            while data := await reader.read(1 << 16):
                writer.write(data)
                await writer.drain()

    async def _answers(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(OSError):
            while data := await reader.read(1 << 16):
                carried = self._carried.get(writer, 0)
                if self._cut_after is not None and carried + len(data) > self._cut_after:
                    writer.write(data[: self._cut_after - carried])
                    await writer.drain()
                    self._cut_after, self.cuts = None, self.cuts + 1
                    await asyncio.sleep(0.05)  # so that what was written gets there before the reset
                    return
                if self._hold_after is not None and carried + len(data) > self._hold_after:
                    first, data = data[: self._hold_after - carried], data[self._hold_after - carried :]
                    writer.write(first)
                    await writer.drain()
                    self._hold_after, self.held, carried = None, self.held + 1, carried + len(first)
                    await self._going.wait()
                if self._flip_after is not None and carried + len(data) > self._flip_after:
                    at = self._flip_after - carried
                    data = data[:at] + bytes((data[at] ^ 1,)) + data[at + 1 :]
                    self._flip_after, self.flips = None, self.flips + 1
                writer.write(data)
                await writer.drain()
                self._carried[writer] = carried + len(data)
