"""The wire format between two engines: frames of a length and JSON, and the greeting.

In the greeting each side proves that it knows the fleet's token without sending it, since an offer may name any address
and the token must not reach other programs.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import secrets
import socket
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import orjson

from controller.core.errors import SlacklineError
from controller.core.kv_links import KvMoved

PIECE_BYTES = 1 << 20
BUFFER_BYTES = 4 << 20
MAX_FRAME = 64 << 10
GREETING_S = 5.0
GOT_IT = b"\x01"
NONCE_LENGTH = 32  # hex digits of 16 random bytes
ALIVE = ((socket.TCP_KEEPIDLE, 10), (socket.TCP_KEEPINTVL, 5), (socket.TCP_KEEPCNT, 3))  # seconds, seconds, probes


class KvTransferError(SlacklineError):
    """The KV transfer failed. `reason` is a stable code: unreachable, refused, other_model (the KV is not for this
    engine), kv_lost (the source no longer has it), cut, corrupt, timeout. `moved`: the figures until then."""

    def __init__(self, message: str, reason: str) -> None:
        super().__init__(message)
        self.reason = reason
        self.moved = KvMoved(reason=reason)


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
    raw = orjson.dumps(content)
    write(writer, len(raw).to_bytes(4, "big") + raw)


async def read_frame(reader: asyncio.StreamReader) -> dict[str, Any]:
    """Read a frame. Raises KvTransferError, and asyncio.IncompleteReadError if the other side has closed the
    connection."""
    length = int.from_bytes(await reader.readexactly(4), "big")
    if length > MAX_FRAME:
        raise KvTransferError(f"a frame of {length} bytes", "corrupt")
    try:
        content = orjson.loads(await reader.readexactly(length))
    except orjson.JSONDecodeError as error:
        raise KvTransferError(f"a frame that is not JSON: {error}", "corrupt") from None
    if not isinstance(content, dict):
        raise KvTransferError("a frame that is not an object", "corrupt")
    return content


async def greet(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, token: str) -> None:
    """Authenticate, on the side that connected. Raises KvTransferError `refused` if either token is wrong."""
    mine = secrets.token_hex(NONCE_LENGTH // 2)
    write_frame(writer, {"nonce": mine})
    said = await read_frame(reader)
    theirs = _nonce(said)
    if not _proves(said, token, "listens", mine, theirs):
        raise KvTransferError("the other side does not know the fleet's token", "refused")
    write_frame(writer, {"proof": _proof(token, "connects", mine, theirs)})
    answer = await read_frame(reader)
    if "error" in answer:
        raise KvTransferError(f"the source refused: {answer['error']}", "refused")


async def be_greeted(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, token: str) -> None:
    """Authenticate, on the side that listens. Raises KvTransferError `refused`; then only a nonce and a proof were
    sent."""
    async with asyncio.timeout(GREETING_S):
        theirs = _nonce(await read_frame(reader))
        mine = secrets.token_hex(NONCE_LENGTH // 2)
        write_frame(writer, {"nonce": mine, "proof": _proof(token, "listens", theirs, mine)})
        said = await read_frame(reader)
        if not _proves(said, token, "connects", theirs, mine):
            write_frame(writer, {"error": "the fleet's token is wrong"})
            await writer.drain()
            raise KvTransferError("a client without the fleet's token asked for KV", "refused")
        write_frame(writer, {"ok": True})


def _proof(token: str, side: str, connects: str, listens: str) -> str:
    return hmac.new(token.encode(), f"{side}:{connects}:{listens}".encode(), hashlib.sha256).hexdigest()


def _proves(said: Mapping[str, Any], token: str, side: str, connects: str, listens: str) -> bool:
    proof = said.get("proof")
    return isinstance(proof, str) and hmac.compare_digest(
        proof.encode(), _proof(token, side, connects, listens).encode()
    )


def _nonce(said: Mapping[str, Any]) -> str:
    nonce = said.get("nonce")
    if not isinstance(nonce, str) or len(nonce) != NONCE_LENGTH:
        raise KvTransferError("the other side is not an engine: it sent no greeting", "refused")
    return nonce


def keep_alive(writer: asyncio.StreamWriter) -> None:
    """Enable TCP keepalive, so that a vanished peer is noticed on an idle connection.

    Raises OSError if the connection has ended."""
    with _still_open(writer):
        connection = writer.get_extra_info("socket")
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in ALIVE:
            connection.setsockopt(socket.IPPROTO_TCP, option, value)
