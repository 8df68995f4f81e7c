"""KV from one engine to another over TCP: the receiver pulls, layer by layer, and says when it has everything.

After the greeting a connection is kept and asked again and again: `ping`, `probe` (so many bytes, to measure), `pull`.
A pull is answered by the layout, then for each layer the entries of the tokens asked for, in pieces so that the loop
keeps serving, and their CRC-32; at the end the receiver sends one byte. A connection that breaks leaves the source as
it was: the same can be pulled again.
"""

from __future__ import annotations

import asyncio
import logging
import time
import zlib
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from controller.core.steps import Seq
from workers.engine.kv_store import KvMismatch, KvStore
from workers.engine.kv_wire import (
    BUFFER_BYTES,
    GOT_IT,
    PIECE_BYTES,
    KvTransferError,
    be_greeted,
    greet,
    read_frame,
    write_frame,
)

STALL_S = 10.0  # a transfer in which nothing comes for so long is given up
PING_S = 3.0  # an answer to a ping takes no longer
TAKEN_S = 30.0  # a receiver that takes nothing for so long is gone
MAX_PROBE_BYTES = 64 << 20
log = logging.getLogger(__name__)


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
    """Where the KV of a prefilled prompt waits: `kv_transfer_params` as the prefill engine answered them. `engine`: its
    instance's id, "" where nobody told it."""

    host: str
    port: int
    request: str
    tokens: int
    first_token: int
    engine: str = ""


# ---- the side that has the KV ---------------------------------------------------------------------------------------


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
        self._open: set[asyncio.StreamWriter] = set()

    async def start(self, host: str, port: int) -> None:
        """`port` 0 takes a free one; then `port` says which."""
        self._server = await asyncio.start_server(self._serve, host, port, limit=BUFFER_BYTES)
        self.port = self._server.sockets[0].getsockname()[1]

    def close(self) -> None:
        """Kept connections too."""
        if self._server is not None:
            self._server.close()
        for writer in list(self._open):
            writer.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._open.add(writer)
        try:
            await be_greeted(reader, writer, self._token)
            while not reader.at_eof():
                await self._answer(await read_frame(reader), reader, writer)
        except asyncio.IncompleteReadError as error:
            if error.partial:
                self._ended_early(error)
        except (OSError, TimeoutError, KvTransferError, KvMismatch) as error:
            self._ended_early(error)
        finally:
            self._open.discard(writer)
            writer.close()
            with suppress(OSError):
                await writer.wait_closed()

    def _ended_early(self, error: Exception) -> None:
        self.traffic.failed += 1
        log.warning("a KV transfer ended early: %s", error or type(error).__name__)

    async def _answer(self, asked: dict[str, Any], reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        match asked.get("op"):
            case "ping":
                write_frame(writer, {"pong": True})
            case "probe":
                await self._probe(asked.get("bytes"), writer)
            case "pull":
                await self._give(asked, reader, writer)
            case other:
                write_frame(writer, {"error": f"unknown op {other!r}"})
        await writer.drain()

    async def _probe(self, size: Any, writer: asyncio.StreamWriter) -> None:
        if not isinstance(size, int) or not 0 < size <= MAX_PROBE_BYTES:
            write_frame(writer, {"error": f"bytes must be between 1 and {MAX_PROBE_BYTES}"})
            return
        write_frame(writer, {"bytes": size})
        piece = bytes(PIECE_BYTES)
        for at in range(0, size, PIECE_BYTES):
            writer.write(piece[: size - at])
            await writer.drain()

    async def _give(self, asked: dict[str, Any], reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        name, start = asked.get("request"), asked.get("start")
        seq = self._held(name) if isinstance(name, str) else None
        if seq is None:
            write_frame(writer, {"error": f"no KV is kept for {name!r}"})
            return
        if not isinstance(start, int) or not 0 <= start <= seq.computed:
            write_frame(writer, {"error": f"start must be between 0 and {seq.computed}"})
            return
        store, tokens = self._store, seq.computed
        write_frame(writer, {"layers": store.layers, "token_bytes": store.token_bytes, "tokens": tokens})
        try:
            for layer in range(store.layers):
                await self._layer(seq, layer, start, tokens, writer)
            confirmed = await reader.readexactly(1)
        except asyncio.IncompleteReadError as error:
            raise KvTransferError(f"the receiver of {name} went away", "cut") from error
        if confirmed == GOT_IT:
            self.traffic.sent += 1
            self._taken(seq)

    async def _layer(self, seq: Seq, layer: int, start: int, tokens: int, writer: asyncio.StreamWriter) -> None:
        step = max(1, PIECE_BYTES // self._store.token_bytes)
        check = 0
        for at in range(start, tokens, step):
            if seq.computed < tokens:
                raise KvTransferError(f"the KV of {seq.id} was released while it was sent", "cut")
            piece = self._store.read(seq, layer, at, min(at + step, tokens))
            check = zlib.crc32(piece, check)
            writer.write(piece)
            self.traffic.sent_bytes += len(piece)
            async with asyncio.timeout(TAKEN_S):
                await writer.drain()
        writer.write(check.to_bytes(4, "big"))


# ---- the side that pulls --------------------------------------------------------------------------------------------


class Connection:
    """One greeted connection to another engine; one question at a time. After any error it is of no use: close it."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        self.received = 0  # bytes of KV by the transfer under way

    @classmethod
    async def open(cls, host: str, port: int, token: str, timeout_s: float) -> Connection:
        """Raises KvTransferError."""
        with as_transfer_errors(f"{host}:{port}", "unreachable"):
            async with asyncio.timeout(timeout_s):
                reader, writer = await asyncio.open_connection(host, port, limit=BUFFER_BYTES)
                try:
                    await greet(reader, writer, token)
                except BaseException:
                    writer.close()
                    raise
        return cls(reader, writer)

    @property
    def gone(self) -> bool:
        """The other side has closed it: seen without asking."""
        return self._reader.at_eof() or self._writer.is_closing()

    def close(self) -> None:
        self._writer.close()

    async def ping(self) -> float:
        """Seconds there and back. Raises KvTransferError."""
        began = time.monotonic()
        await self._ask({"op": "ping"}, PING_S)
        return time.monotonic() - began

    async def probe(self, size: int) -> float:
        """Seconds in which `size` bytes came. Raises KvTransferError."""
        await self._ask({"op": "probe", "bytes": size})
        began = time.monotonic()
        with as_transfer_errors("probe", "cut"):
            for at in range(0, size, PIECE_BYTES):
                await self._read(min(PIECE_BYTES, size - at))
        return time.monotonic() - began

    async def pull(self, offer: Offer, seq: Seq, store: KvStore, traffic: Traffic) -> None:
        """Bring the KV of the prompt into the blocks of `seq`, from its first token that is not cached here.

        Raises KvTransferError; then what is in the blocks is worthless.
        """
        self.received = 0
        header = await self._ask({"op": "pull", "request": offer.request, "start": seq.cached})
        wanted = {"layers": store.layers, "token_bytes": store.token_bytes, "tokens": offer.tokens}
        if header != wanted:
            raise KvTransferError(f"the source has another layout: {header} instead of {wanted}", "refused")
        with as_transfer_errors(f"KV of {offer.request} from {offer.host}:{offer.port}", "cut"):
            for layer in range(store.layers):
                await self._layer(seq, layer, offer.tokens, store, traffic)
            self._writer.write(GOT_IT)
            await self._writer.drain()

    async def _layer(self, seq: Seq, layer: int, tokens: int, store: KvStore, traffic: Traffic) -> None:
        step = max(1, PIECE_BYTES // store.token_bytes)
        check = 0
        for at in range(seq.cached, tokens, step):
            piece = await self._read((min(at + step, tokens) - at) * store.token_bytes)
            check = zlib.crc32(piece, check)
            self.received += len(piece)
            traffic.received_bytes += len(piece)
            try:
                store.write(seq, layer, at, piece)
            except KvMismatch as error:
                raise KvTransferError(str(error), "corrupt") from error
        if await self._read(4) != check.to_bytes(4, "big"):
            raise KvTransferError(f"layer {layer} came with a wrong checksum", "corrupt")

    async def _ask(self, question: dict[str, Any], within_s: float = STALL_S) -> dict[str, Any]:
        with as_transfer_errors(str(question["op"]), "cut"):
            write_frame(self._writer, question)
            await self._writer.drain()
            async with asyncio.timeout(within_s):
                answer = await read_frame(self._reader)
        if "error" in answer:
            raise KvTransferError(f"the source refused: {answer['error']}", "refused")
        return answer

    async def _read(self, size: int) -> bytes:
        try:
            async with asyncio.timeout(STALL_S):
                return await self._reader.readexactly(size)
        except asyncio.IncompleteReadError as error:
            self.received += len(error.partial)
            raise


class as_transfer_errors:
    """What sockets raise, as KvTransferError with `reason`; a time-out is one of `timeout`."""

    def __init__(self, what: str, reason: str) -> None:
        self._what = what
        self._reason = reason

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, TimeoutError):
            raise KvTransferError(f"{self._what}: no answer in time", "timeout") from error
        if isinstance(error, asyncio.IncompleteReadError):
            raise KvTransferError(f"{self._what}: the other side closed the connection", "cut") from error
        if isinstance(error, OSError):
            raise KvTransferError(f"{self._what}: {error}", self._reason) from error
