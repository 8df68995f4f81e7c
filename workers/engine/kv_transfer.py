"""KV from one engine to another over TCP: the receiver pulls, layer by layer, and says when it has everything.

Frames: a length of four bytes and JSON, both ways; then for each layer the entries of the tokens asked for, in pieces
so that the loop keeps serving, and their CRC-32; at the end one byte from the receiver. Only those who know the fleet's
token get anything. A connection that breaks leaves the source as it was: the same can be pulled again.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
import time
import zlib
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import orjson

from controller.core.errors import SlacklineError
from controller.core.steps import Seq
from workers.engine.kv_store import KvMismatch, KvStore

PIECE_BYTES = 1 << 20
BUFFER_BYTES = 4 << 20
MAX_FRAME = 64 << 10
GREETING_S = 5.0
GOT_IT = b"\x01"
log = logging.getLogger(__name__)


class KvTransferError(SlacklineError):
    """The KV did not come whole; `reason` is short and stable: unreachable, refused, cut, corrupt, timeout."""

    def __init__(self, message: str, reason: str) -> None:
        super().__init__(message)
        self.reason = reason


@dataclass(slots=True)
class Traffic:
    """Bytes and transfers since the start."""

    sent_bytes: int = 0
    received_bytes: int = 0
    sent: int = 0
    received: int = 0
    failed: int = 0
    receiving_s: float = 0.0  # of pulls that ended well, added up


@dataclass(frozen=True, slots=True)
class Offer:
    """Where the KV of a prefilled prompt waits: `kv_transfer_params` as the prefill engine answered them."""

    host: str
    port: int
    request: str
    tokens: int
    first_token: int


class KvServer:
    """Gives out what `held` finds by sequence id; `taken` is told once the other side has it."""

    def __init__(
        self, store: KvStore, token: str, held: Callable[[str], Seq | None], taken: Callable[[Seq], None]
    ) -> None:
        self.traffic = Traffic()
        self.port = 0
        self._store = store
        self._token = token
        self._held = held
        self._taken = taken
        self._server: asyncio.Server | None = None

    async def start(self, host: str, port: int) -> None:
        """`port` 0 takes a free one; then `port` says which."""
        self._server = await asyncio.start_server(self._serve, host, port, limit=BUFFER_BYTES)
        self.port = self._server.sockets[0].getsockname()[1]

    def close(self) -> None:
        if self._server is not None:
            self._server.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await self._give(reader, writer)
        except (OSError, asyncio.IncompleteReadError, TimeoutError, KvTransferError) as error:
            self.traffic.failed += 1
            log.warning("a KV transfer ended early: %s", error)
        finally:
            writer.close()
            with suppress(OSError):
                await writer.wait_closed()

    async def _give(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        async with asyncio.timeout(GREETING_S):
            asked = await _read_frame(reader)
        token, name, start = asked.get("token"), asked.get("request"), asked.get("start")
        if not (isinstance(token, str) and hmac.compare_digest(token.encode(), self._token.encode())):
            await _refuse(writer, "the fleet's token is wrong")
            raise KvTransferError("somebody without the fleet's token asked for KV", "refused")
        seq = self._held(name) if isinstance(name, str) else None
        if seq is None:
            await _refuse(writer, f"no KV is kept for {name!r}")
            return
        if not isinstance(start, int) or not 0 <= start <= seq.computed:
            await _refuse(writer, f"start must be between 0 and {seq.computed}")
            return
        store = self._store
        _write_frame(writer, {"layers": store.layers, "token_bytes": store.token_bytes, "tokens": seq.computed})
        for layer in range(store.layers):
            await self._layer(seq, layer, start, writer)
        if await reader.readexactly(1) == GOT_IT:
            self.traffic.sent += 1
            self._taken(seq)

    async def _layer(self, seq: Seq, layer: int, start: int, writer: asyncio.StreamWriter) -> None:
        step = max(1, PIECE_BYTES // self._store.token_bytes)
        check = 0
        for at in range(start, seq.computed, step):
            piece = self._store.read(seq, layer, at, min(at + step, seq.computed))
            check = zlib.crc32(piece, check)
            writer.write(piece)
            self.traffic.sent_bytes += len(piece)
            await writer.drain()
        writer.write(check.to_bytes(4, "big"))


async def pull(offer: Offer, seq: Seq, store: KvStore, token: str, traffic: Traffic, timeout_s: float) -> None:
    """Bring the KV of the prompt into the blocks of `seq`, from its first token that is not cached here.

    Raises KvTransferError; then what is in the blocks is worthless.
    """
    began = time.monotonic()
    try:
        async with asyncio.timeout(timeout_s):
            await _pull(offer, seq, store, token, traffic)
        traffic.receiving_s += time.monotonic() - began
    except TimeoutError:
        traffic.failed += 1
        raise KvTransferError(f"KV of {offer.request} did not come within {timeout_s:g} s", "timeout") from None
    except (OSError, asyncio.IncompleteReadError) as error:
        traffic.failed += 1
        reason = "cut" if isinstance(error, asyncio.IncompleteReadError) else "unreachable"
        raise KvTransferError(f"KV of {offer.request} from {offer.host}:{offer.port}: {error}", reason) from error
    except KvTransferError:
        traffic.failed += 1
        raise


async def _pull(offer: Offer, seq: Seq, store: KvStore, token: str, traffic: Traffic) -> None:
    reader, writer = await asyncio.open_connection(offer.host, offer.port, limit=BUFFER_BYTES)
    try:
        _write_frame(writer, {"token": token, "request": offer.request, "start": seq.cached})
        header = await _read_frame(reader)
        if "error" in header:
            raise KvTransferError(f"the source refused: {header['error']}", "refused")
        wanted = {"layers": store.layers, "token_bytes": store.token_bytes, "tokens": offer.tokens}
        if header != wanted:
            raise KvTransferError(f"the source has another layout: {header} instead of {wanted}", "refused")
        for layer in range(store.layers):
            await _take_layer(reader, seq, layer, offer.tokens, store, traffic)
        writer.write(GOT_IT)
        await writer.drain()
        traffic.received += 1
    finally:
        writer.close()
        with suppress(OSError):
            await writer.wait_closed()


async def _take_layer(
    reader: asyncio.StreamReader, seq: Seq, layer: int, tokens: int, store: KvStore, traffic: Traffic
) -> None:
    step = max(1, PIECE_BYTES // store.token_bytes)
    check = 0
    for at in range(seq.cached, tokens, step):
        piece = await reader.readexactly((min(at + step, tokens) - at) * store.token_bytes)
        check = zlib.crc32(piece, check)
        traffic.received_bytes += len(piece)
        try:
            store.write(seq, layer, at, piece)
        except KvMismatch as error:
            raise KvTransferError(str(error), "corrupt") from error
    if await reader.readexactly(4) != check.to_bytes(4, "big"):
        raise KvTransferError(f"layer {layer} came with a wrong checksum", "corrupt")


async def _refuse(writer: asyncio.StreamWriter, why: str) -> None:
    _write_frame(writer, {"error": why})
    await writer.drain()


def _write_frame(writer: asyncio.StreamWriter, content: Mapping[str, Any]) -> None:
    raw = orjson.dumps(content)
    writer.write(len(raw).to_bytes(4, "big") + raw)


async def _read_frame(reader: asyncio.StreamReader) -> dict[str, Any]:
    length = int.from_bytes(await reader.readexactly(4), "big")
    if length > MAX_FRAME:
        raise KvTransferError(f"a frame of {length} bytes", "corrupt")
    try:
        content = orjson.loads(await reader.readexactly(length))
    except orjson.JSONDecodeError as error:
        raise KvTransferError(f"a frame that is not JSON: {error}", "corrupt") from None
    if not isinstance(content, dict):
        raise KvTransferError("a frame that is no object", "corrupt")
    return content
