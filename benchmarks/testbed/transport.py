"""Flows of a testbed as real TCP: one connection each while it lasts, kept open for the next flow between two hosts.

All hosts' sockets belong to one process, so that its clock is everybody's: a socket stays in the network it was made
in. The bytes pass both hosts' ports and the switch. Every connection keeps few unsent bytes in the kernel, with a
daemon or without, since those cannot be called back.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import socket
import struct
from collections.abc import Mapping

from benchmarks.testbed.hosts import EmulatedHost, tos_of
from workers.flowd.client import Flow

PORT = 7000
UNSENT_BYTES = 128 << 10
CHUNK = bytes(64 << 10)
HEADER = struct.Struct("!QQ")  # number of the flow, bytes that follow
CONNECT_S = 5.0
STALL_S = 30.0  # without one byte taken


class ReceivingEnd(asyncio.BufferedProtocol):
    """The receiving end of one connection."""

    def __init__(self, owner: Transport) -> None:
        self._owner = owner
        self._buffer = bytearray(256 << 10)
        self._head = b""
        self._number = self._left = 0
        self.transport: asyncio.BaseTransport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport
        self._owner.accepted(transport.get_extra_info("peername"), self)

    def get_buffer(self, sizehint: int) -> bytearray:
        return self._buffer

    def buffer_updated(self, nbytes: int) -> None:
        at = 0
        while at < nbytes:
            if self._left:
                taken = min(self._left, nbytes - at)
                self._left -= taken
                at += taken
            else:
                taken = min(HEADER.size - len(self._head), nbytes - at)
                self._head += self._buffer[at : at + taken]
                at += taken
                if len(self._head) < HEADER.size:
                    continue
                self._number, self._left = HEADER.unpack(self._head)
                self._head = b""
            if not self._left:
                self._owner.arrived(self._number)

    def mark(self, tos: int) -> None:
        """Mark what acknowledges the flow, too."""
        if self.transport is not None:
            with contextlib.suppress(OSError):
                self.transport.get_extra_info("socket").setsockopt(socket.IPPROTO_IP, socket.IP_TOS, tos)


class SendingEnd:
    """The sending end. `tos`: of its packets now."""

    def __init__(self, sender: socket.socket, receiver: ReceivingEnd) -> None:
        self.socket = sender
        self.receiver = receiver
        self.tos = 0

    def mark(self, wire_class: int | None) -> None:
        tos = tos_of(wire_class)
        if tos != self.tos:
            self.tos = tos
            self.socket.setsockopt(socket.IPPROTO_IP, socket.IP_TOS, tos)
            self.receiver.mark(tos)

    async def writable(self) -> None:
        """Return once few bytes are unsent. Raises TimeoutError if the other side takes nothing."""
        loop = asyncio.get_running_loop()
        ready: asyncio.Future[None] = loop.create_future()
        loop.add_writer(self.socket.fileno(), _set, ready)
        try:
            async with asyncio.timeout(STALL_S):
                await ready
        finally:
            loop.remove_writer(self.socket.fileno())

    async def write(self, data: bytes | memoryview) -> int:
        while True:
            try:
                return self.socket.send(data)
            except BlockingIOError:
                await self.writable()


class Transport:
    """Sends flows between hosts. Use `async with`."""

    def __init__(self, hosts: Mapping[str, EmulatedHost]) -> None:
        self._hosts = hosts
        self._numbers = itertools.count(1)
        self._arriving: dict[int, asyncio.Future[None]] = {}
        self._idle: dict[tuple[str, str, int], list[SendingEnd]] = {}
        self._connections: list[SendingEnd] = []
        self._accepted: dict[tuple[str, int], asyncio.Future[ReceivingEnd]] = {}
        self._servers: list[asyncio.Server] = []
        self.sent_bytes = 0

    async def __aenter__(self) -> Transport:
        loop = asyncio.get_running_loop()
        for host in self._hosts.values():
            listener = host.socket()
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # connections of a run before may linger
            listener.bind(("", PORT))
            self._servers.append(await loop.create_server(lambda: ReceivingEnd(self), sock=listener))
        return self

    async def __aexit__(self, *error: object) -> None:
        for server in self._servers:
            server.close()
        for each in self._connections:
            each.socket.close()
            if each.receiver.transport is not None:
                each.receiver.transport.close()
        await asyncio.sleep(0)

    def arrived(self, number: int) -> None:
        waiting = self._arriving.get(number)
        if waiting is not None:
            _set(waiting)

    def accepted(self, peer: tuple[str, int], receiver: ReceivingEnd) -> None:
        waiting = self._accepted.get(peer)
        if waiting is not None and not waiting.done():
            waiting.set_result(receiver)

    async def send(
        self,
        source: str,
        target: str,
        size: int,
        flow: Flow | None = None,
        fabric: int = 0,
        wire_class: int | None = None,
    ) -> None:
        """Return once the receiver has all bytes. `flow`: its schedule, which ends with its last byte in the kernel;
        without one its packets have `wire_class`. Raises OSError and TimeoutError."""
        try:
            way = (source, target, fabric)
            connection = self._idle[way].pop() if self._idle.get(way) else await self._connect(*way)
            number = next(self._numbers)
            arrived = self._arriving[number] = asyncio.get_running_loop().create_future()
            try:
                await self._write(connection, number, size, flow, wire_class)
                if flow is not None:
                    flow.end()
                async with asyncio.timeout(STALL_S):
                    await arrived
            finally:
                del self._arriving[number]
            self._idle.setdefault(way, []).append(connection)
            self.sent_bytes += size
        finally:
            if flow is not None:
                flow.end()

    async def _write(
        self, connection: SendingEnd, number: int, size: int, flow: Flow | None, wire_class: int | None
    ) -> None:
        head, left = HEADER.pack(number, size), size
        if flow is None:
            connection.mark(wire_class)
        while left:
            if flow is not None:
                if not flow.may_send:
                    await flow.turn(_nothing)
                connection.mark(flow.wire_class)
            if head:
                head = head[await connection.write(head) :]
                continue
            sent = await connection.write(memoryview(CHUNK)[: min(left, len(CHUNK))])
            left -= sent
            if flow is not None:
                flow.sent(sent)
            if left:
                await connection.writable()

    async def _connect(self, source: str, target: str, fabric: int) -> SendingEnd:
        loop, here, there = asyncio.get_running_loop(), self._hosts[source], self._hosts[target]
        sender = here.socket()
        sender.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sender.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, UNSENT_BYTES)
        sender.bind((here.addresses[fabric], 0))
        own: tuple[str, int] = sender.getsockname()
        waiting = self._accepted[own] = loop.create_future()
        try:
            async with asyncio.timeout(CONNECT_S):
                await loop.sock_connect(sender, (there.addresses[fabric], PORT))
                receiver = await waiting
        except BaseException:
            sender.close()
            raise
        finally:
            del self._accepted[own]
        connection = SendingEnd(sender, receiver)
        self._connections.append(connection)
        return connection


def _set(waiting: asyncio.Future[None]) -> None:
    if not waiting.done():
        waiting.set_result(None)


async def _nothing() -> None:
    """A held flow tells nobody: the receiver is this process."""
