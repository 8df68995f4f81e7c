"""What a hostile client does, on raw sockets: used by the tests of the servers' limits and by `make test-attacks`.

Each attack opens connections from this machine, at loopback alone, and returns what it saw: how many connections the
server still holds, and the first bytes of what it answered.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Awaitable, Callable
from typing import NamedTuple

PIECE = 64 << 10


class AttackSeen(NamedTuple):
    """`held`: connections that the server had not closed in the end. `answer`: what one of them was told."""

    held: int
    answer: bytes
    sent: int = 0  # bytes that the server took in


class Socket:
    """One raw connection. It reads in the background, unless told not to."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer
        self.answer = b""
        self.sent = 0
        self.closed = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []

    def listen(self) -> Socket:
        self._tasks.append(asyncio.get_running_loop().create_task(self._read()))
        return self

    def drip(self, piece: bytes, period_s: float) -> None:
        """Send `piece` every now and then, until the server closes."""
        self._tasks.append(asyncio.get_running_loop().create_task(self._drip(piece, period_s)))

    async def _drip(self, piece: bytes, period_s: float) -> None:
        while await self.send(piece):
            await asyncio.sleep(period_s)

    async def _read(self) -> None:
        with contextlib.suppress(OSError):
            while data := await self.reader.read(PIECE):
                self.answer = (self.answer + data)[:4096]
        self.closed.set()

    async def send(self, data: bytes) -> bool:
        """False once the server has closed."""
        if self.closed.is_set():
            return False
        try:
            self.writer.write(data)
            await self.writer.drain()
        except OSError:
            self.closed.set()
            return False
        self.sent += len(data)
        return True

    async def over(self, within_s: float) -> bool:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self.closed.wait(), within_s)
        return self.closed.is_set()

    def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        with contextlib.suppress(OSError, RuntimeError):
            self.writer.transport.abort()


async def connect(port: int, *, receive_buffer: int | None = None) -> Socket:
    sock = socket.socket()
    sock.setblocking(False)
    if receive_buffer is not None:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
    try:
        await asyncio.get_running_loop().sock_connect(sock, ("127.0.0.1", port))
        reader, writer = await asyncio.open_connection(sock=sock, limit=PIECE)
    except BaseException:
        sock.close()
        raise
    return Socket(reader, writer)


async def _all(port: int, count: int, each: Callable[[Socket], Awaitable[object]], within_s: float) -> AttackSeen:
    """`count` connections that all do the same; then how many are held after `within_s` more seconds."""
    opened: list[Socket] = []

    async def one() -> None:
        try:
            connection = await connect(port)
        except OSError:
            return
        opened.append(connection.listen())
        with contextlib.suppress(OSError):
            await each(connection)

    try:
        for start in range(0, count, 100):  # the listener's backlog is finite
            await asyncio.gather(*(one() for _ in range(min(100, count - start))))
        await asyncio.gather(*(connection.over(within_s) for connection in opened))
        held = sum(not connection.closed.is_set() for connection in opened)
        answer = next((connection.answer for connection in opened if connection.answer), b"")
        return AttackSeen(held, answer, max((connection.sent for connection in opened), default=0))
    finally:
        for connection in opened:
            connection.close()


async def half_open(
    port: int, count: int, within_s: float, head: bytes = b"GET / HTTP/1.1\r\nHost: x\r\n"
) -> AttackSeen:
    """Requests whose head never ends."""
    return await _all(port, count, lambda connection: connection.send(head), within_s)


async def silent(port: int, count: int, within_s: float) -> AttackSeen:
    """Connections on which nothing is ever sent."""
    return await _all(port, count, lambda connection: asyncio.sleep(0), within_s)


async def slow_head(port: int, count: int, within_s: float, period_s: float = 0.2) -> AttackSeen:
    """Slowloris: a header every now and then, forever."""

    async def drip(connection: Socket) -> None:
        await connection.send(b"GET / HTTP/1.1\r\nHost: x\r\n")
        connection.drip(b"x-a: b\r\n", period_s)

    return await _all(port, count, drip, within_s)


async def blank_lines(port: int, count: int, within_s: float) -> AttackSeen:
    """Empty lines, which may come before a request and which the parser skips."""

    async def drip(connection: Socket) -> None:
        for _ in range(3):
            await connection.send(b"\r\n")
            await asyncio.sleep(0.05)

    return await _all(port, count, drip, within_s)


async def endless(port: int, head: bytes, piece: bytes, most: int, within_s: float = 5.0) -> AttackSeen:
    """`head`, then `piece` again and again, until the server closes or `most` bytes are sent."""

    async def pour(connection: Socket) -> None:
        await connection.send(head)
        while connection.sent < most and await connection.send(piece):
            await asyncio.sleep(0)

    return await _all(port, 1, pour, within_s)


async def large_header(port: int, size: int = 64 << 20) -> AttackSeen:
    return await endless(port, b"GET / HTTP/1.1\r\nHost: x\r\nx-a: ", b"a" * PIECE, size)


async def many_headers(port: int, count: int = 200_000) -> AttackSeen:
    line = b"x-a: b\r\n"
    return await endless(port, b"GET / HTTP/1.1\r\nHost: x\r\n", line * 2_000, count * len(line))


async def slow_body(port: int, count: int, within_s: float, request: bytes, period_s: float = 0.2) -> AttackSeen:
    """A body that is declared and comes a byte at a time."""

    async def drip(connection: Socket) -> None:
        await connection.send(request)
        connection.drip(b" ", period_s)

    return await _all(port, count, drip, within_s)


async def never_read(port: int, count: int, within_s: float, request: bytes) -> AttackSeen:
    """A request whose answer is never read: the smallest window, and no read call. Whether the server hung up shows
    when something is sent."""
    opened: list[Socket] = []
    try:
        for _ in range(count):
            connection = await connect(port, receive_buffer=2_048)
            connection.reader._transport.pause_reading()  # type: ignore[attr-defined]
            opened.append(connection)
            await connection.send(request)
        await asyncio.sleep(within_s)
        held = 0
        for connection in opened:
            connection.listen()
            transport = connection.writer.transport
            transport.resume_reading()  # type: ignore[attr-defined]
            held += not await connection.over(0.5)
        return AttackSeen(held, b"")
    finally:
        for connection in opened:
            connection.close()


async def flood(port: int, count: int, within_s: float, request: bytes) -> list[bytes]:
    """Whole requests, one right after the other, and what each was told before its client hung up."""
    opened = [(await connect(port)).listen() for _ in range(count)]
    sending: list[asyncio.Task[bool]] = []
    try:
        for connection in opened:
            sending.append(asyncio.get_running_loop().create_task(connection.send(request)))
            await asyncio.sleep(0)  # all at once would keep this loop, on which an honest client may run, for 100 ms
        await asyncio.gather(*sending)
        await asyncio.sleep(within_s)
        return [connection.answer for connection in opened]
    finally:
        for connection in opened:
            connection.close()
