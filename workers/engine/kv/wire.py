"""The wire format between two engines: frames of a length and JSON, and the greeting.

In the greeting each side proves that it knows the fleet's token without sending it (`workers.http.fleet_proof`). The
proofs cover the address that was meant: a program between two engines could otherwise pass their greetings on and then
ask for KV itself.
"""

from __future__ import annotations

import asyncio
import secrets
import socket
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from controller.core.errors import SlacklineError
from controller.core.kv_links import KvMoved
from workers.http.fleet_proof import address, keyed, proves
from workers.small_json import dumps, loads

PIECE_BYTES = 1 << 20
BUFFER_BYTES = 4 << 20
MAX_FRAME = 64 << 10
GREETING_S = 5.0
STALL_S = 10.0  # a transfer without data for this long is given up
TAKEN_S = 30.0  # a receiver that reads nothing for this long counts as gone
GOT_IT = b"\x01"
CLASSES = 8  # of packets on a shared link
NONCE_LENGTH = 32  # hex digits of 16 random bytes
ALIVE = ((socket.TCP_KEEPIDLE, 10), (socket.TCP_KEEPINTVL, 5), (socket.TCP_KEEPCNT, 3))  # seconds, seconds, probes


class KvTransferError(SlacklineError):
    """The KV transfer failed. `reason` is a stable code: unreachable, refused, other_model (the KV is not for this
    engine), kv_lost (the source no longer has it), cut, corrupt, timeout. `moved`: the figures until then."""

    def __init__(self, message: str, reason: str) -> None:
        super().__init__(message)
        self.reason = reason
        self.moved = KvMoved(reason=reason)


class as_transfer_errors:
    """Context manager that turns errors of sockets into KvTransferError with `reason`; timeouts get `timeout`."""

    def __init__(self, what: str, reason: str) -> None:
        self._what = what
        self._reason = reason

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, TimeoutError):
            raise KvTransferError(f"{self._what}: no response in time", "timeout") from error
        if isinstance(error, asyncio.IncompleteReadError):
            raise KvTransferError(f"{self._what}: the other side closed the connection", "cut") from error
        if isinstance(error, OSError | UnicodeError):  # UnicodeError: an invalid host name
            raise KvTransferError(f"{self._what}: {error}", self._reason) from error


@contextmanager
def _still_open(writer: asyncio.StreamWriter) -> Iterator[None]:
    """Raises ConnectionResetError if the connection has ended. asyncio would silently drop what is written, and uvloop,
    which engines use, raises RuntimeError."""
    if writer.is_closing():
        raise ConnectionResetError("the connection is closed")
    try:
        yield
    except RuntimeError as error:
        raise ConnectionResetError(str(error)) from error


def write(writer: asyncio.StreamWriter, data: bytes) -> None:
    """Write to the connection; all other functions use it. Raises ConnectionResetError."""
    with _still_open(writer):
        writer.write(data)


def write_frame(writer: asyncio.StreamWriter, content: Mapping[str, Any]) -> None:
    """Write a frame. Raises ConnectionResetError."""
    raw = dumps(content)
    write(writer, len(raw).to_bytes(4, "big") + raw)


async def read_frame(reader: asyncio.StreamReader) -> dict[str, Any]:
    """Read a frame. Raises KvTransferError, and asyncio.IncompleteReadError if the other side has closed the
    connection."""
    length = int.from_bytes(await reader.readexactly(4), "big")
    if length > MAX_FRAME:
        raise KvTransferError(f"a frame of {length} bytes", "corrupt")
    try:
        content = loads(await reader.readexactly(length))
    except ValueError as error:
        raise KvTransferError(f"a frame that is not JSON: {error}", "corrupt") from None
    if not isinstance(content, dict):
        raise KvTransferError("a frame that is not an object", "corrupt")
    return content


async def connect(
    host: str, port: int, token: str, timeout_s: float
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """To another engine, and authenticate. Raises KvTransferError, OSError, TimeoutError, UnicodeError and
    IncompleteReadError (`as_transfer_errors`)."""
    async with asyncio.timeout(timeout_s):
        reader, writer = await asyncio.open_connection(host, port, limit=BUFFER_BYTES)
        try:
            keep_alive(writer)
            await greet(reader, writer, token, address(host, port))
        except BaseException:
            writer.close()
            raise
    return reader, writer


async def greet(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, token: str, to: str) -> None:
    """Authenticate, on the side that connected. `to`: the address of the other side. Raises KvTransferError `refused`
    if either token is wrong, or if the other side has another address."""
    mine = secrets.token_hex(NONCE_LENGTH // 2)
    write_frame(writer, {"nonce": mine, "to": to})
    said = await read_frame(reader)
    if "error" in said:
        raise KvTransferError(f"the source refused: {said['error']}", "refused")
    theirs = _nonce(said)
    if not proves(said.get("proof"), token, "listens", to, mine, theirs):
        raise KvTransferError("the other side does not know the fleet's token", "refused")
    write_frame(writer, {"proof": keyed(token, "connects", to, mine, theirs)})
    answer = await read_frame(reader)
    if "error" in answer:
        raise KvTransferError(f"the source refused: {answer['error']}", "refused")


async def be_greeted(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, token: str, names: Collection[str]
) -> None:
    """Authenticate, on the side that listens. `names`: its own addresses. Raises KvTransferError `refused`; then only a
    nonce and a proof were sent, or nothing if the client meant another address."""
    async with asyncio.timeout(GREETING_S):
        hello = await read_frame(reader)
        theirs, to = _nonce(hello), hello.get("to")
        if not isinstance(to, str) or to not in names:
            await _refuse(writer, f"this engine is {' or '.join(sorted(names))}")
            raise KvTransferError(f"a client asked for KV of {str(to)[:100]!r}", "refused")
        mine = secrets.token_hex(NONCE_LENGTH // 2)
        write_frame(writer, {"nonce": mine, "proof": keyed(token, "listens", to, theirs, mine)})
        said = await read_frame(reader)
        if not proves(said.get("proof"), token, "connects", to, theirs, mine):
            await _refuse(writer, "the fleet's token is wrong")
            raise KvTransferError("a client without the fleet's token asked for KV", "refused")
        write_frame(writer, {"ok": True})


async def _refuse(writer: asyncio.StreamWriter, why: str) -> None:
    write_frame(writer, {"error": why})
    await writer.drain()


def _nonce(said: Mapping[str, Any]) -> str:
    nonce = said.get("nonce")
    if not isinstance(nonce, str) or len(nonce) != NONCE_LENGTH:
        raise KvTransferError("the other side is not an engine: it sent no greeting", "refused")
    return nonce


async def drained(writer: asyncio.StreamWriter) -> None:
    """Wait while too much data is unsent. Raises TimeoutError if the other side reads nothing."""
    async with asyncio.timeout(TAKEN_S):
        await writer.drain()


def as_class(writer: asyncio.StreamWriter, wire_class: int | None) -> None:
    """Mark the packets that this end sends: class 0, the most urgent, as DSCP CS7, class 7 and None as CS0.

    Raises OSError if the connection has ended."""
    with _still_open(writer):
        connection = writer.get_extra_info("socket")
        tos = 0 if wire_class is None else (CLASSES - 1 - wire_class) << 5
        if connection.family == socket.AF_INET6:
            connection.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_TCLASS, tos)
        else:
            connection.setsockopt(socket.IPPROTO_IP, socket.IP_TOS, tos)


def keep_alive(writer: asyncio.StreamWriter) -> None:
    """Enable TCP keepalive, so that a vanished peer is noticed on an idle connection.

    Raises OSError if the connection has ended."""
    with _still_open(writer):
        connection = writer.get_extra_info("socket")
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in ALIVE:
            connection.setsockopt(socket.IPPROTO_TCP, option, value)
