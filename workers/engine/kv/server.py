"""KV transfers over TCP, the side of the source. `transfer` is the other side, and describes the protocol.

A prompt that is still being computed is sent as far as it exists: ended steps, and of the running step the layers that
it has passed (`progress`).
"""

from __future__ import annotations

import asyncio
import logging
import zlib
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

from controller.core.steps import FinishReason, Seq, SeqState
from workers.engine.kv.lender import PrefixLender
from workers.engine.kv.progress import KvProgress
from workers.engine.kv.store import KvMismatch, KvStore
from workers.engine.kv.transfer import KvTraffic
from workers.engine.kv.turns import Turns, TurnsConfig
from workers.engine.kv.unproven_connections import UnprovenConnections
from workers.engine.kv.wire import (
    BUFFER_BYTES,
    GOT_IT,
    PIECE_BYTES,
    TAKEN_S,
    KvTransferError,
    be_greeted,
    drained,
    keep_alive,
    read_frame,
    write,
    write_frame,
)
from workers.http.fleet_proof import address

STILL_S = 1.0  # how often a source reports that it still computes
LOOK_S = 0.002  # how often a running step is polled for passed layers, which nothing reports
MAX_PROBE_BYTES = 64 << 20
log = logging.getLogger(__name__)


class KvServer:
    """Sends KV. `held` finds a sequence by id; `taken` is called once the other engine has its KV. `names`: addresses
    under which other engines know this one, besides that of the socket. `lender`: None lends no prefixes."""

    def __init__(
        self,
        store: KvStore,
        token: str,
        held: Callable[[str], Seq | None],
        taken: Callable[[Seq], None],
        progress: KvProgress | None = None,
        turns: TurnsConfig | None = None,
        lender: PrefixLender | None = None,
    ) -> None:
        self._lender = lender
        self.traffic = KvTraffic()
        self.port = 0
        self.names: set[str] = set()
        self._store = store
        self._token = token
        self._held = held
        self._taken = taken
        self._progress = progress or KvProgress()
        self.turns = turns or TurnsConfig()
        self.unproven = UnprovenConnections()
        self._server: asyncio.Server | None = None
        self._open: set[asyncio.StreamWriter] = set()

    async def start(self, host: str, port: int) -> None:
        """Listen. `port` 0 takes a free one, which the attribute `port` then has."""
        self._server = await asyncio.start_server(self._serve, host, port, limit=BUFFER_BYTES)
        self.port = self._server.sockets[0].getsockname()[1]

    def close(self) -> None:
        """Close the server and all connections."""
        if self._server is not None:
            self._server.close()
        for writer in list(self._open):
            writer.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._open.add(writer)
        self.unproven.come(writer)
        known = False
        try:
            keep_alive(writer)
            own = address(*writer.get_extra_info("sockname")[:2])
            await be_greeted(reader, writer, self._token, {own, *self.names})
            known = True
            self.unproven.go(writer)
            while not reader.at_eof():
                await self._answer(await read_frame(reader), reader, writer)
        except asyncio.IncompleteReadError as error:
            if error.partial:
                self._ended_early(error, known)
        except TimeoutError as error:
            self._ended_early(error, known)
            writer.transport.abort()  # without waiting for unsent data
        except (OSError, KvTransferError, KvMismatch) as error:
            self._ended_early(error, known)
        except Exception as error:  # a defect, most likely of the store; the receiver sees a cut transfer and retries
            log.exception("a KV transfer failed unexpectedly")
            self._ended_early(error)
        finally:
            self._open.discard(writer)
            self.unproven.go(writer)
            writer.close()
            with suppress(OSError):
                await writer.wait_closed()

    def _ended_early(self, error: Exception, known: bool = True) -> None:
        self.traffic.failed += 1
        if not known:
            self.unproven.failed(error)
            return
        log.warning("a KV transfer ended early: %s", error or type(error).__name__)

    async def _answer(self, asked: dict[str, Any], reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        match asked.get("op"):
            case "ping":
                write_frame(writer, {"pong": True})
            case "probe":
                await self._probe(asked.get("bytes"), writer)
            case "take":
                await self._give(asked, reader, writer)
            case "holds" | "lend" if self._lender is not None:
                await self._lender.answer(asked, reader, writer)
            case other:
                write_frame(writer, {"error": f"unknown op {other!r}"})
        await drained(writer)

    async def _probe(self, size: Any, writer: asyncio.StreamWriter) -> None:
        if not isinstance(size, int) or not 0 < size <= MAX_PROBE_BYTES:
            write_frame(writer, {"error": f"bytes must be between 1 and {MAX_PROBE_BYTES}"})
            return
        write_frame(writer, {"bytes": size})
        piece = bytes(PIECE_BYTES)
        for at in range(0, size, PIECE_BYTES):
            write(writer, piece[: size - at])
            await drained(writer)

    async def _give(self, asked: dict[str, Any], reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        name, start = asked.get("request"), asked.get("start")
        seq = self._held(name) if isinstance(name, str) else None
        if seq is None:
            write_frame(writer, {"error": f"no KV is kept for {name!r}", "lost": True})
            return
        tokens = seq.prompt_tokens
        if not isinstance(start, int) or not 0 <= start <= tokens:
            write_frame(writer, {"error": f"start must be between 0 and {tokens}"})
            return
        write_frame(writer, {**self._store.layout.as_json(asked.get("layout")), "tokens": tokens})
        size = (tokens - start) * self._store.layers * self._store.token_bytes
        turns = self.turns.begin(seq, size, asked, writer)
        sending = _Sending(seq, start, writer, self._store, self._progress, self.traffic, turns)
        try:
            if not await sending.run(reader.at_eof):
                return
        finally:
            turns.end()
        try:
            async with asyncio.timeout(TAKEN_S):
                confirmed = await reader.readexactly(1)
        except asyncio.IncompleteReadError as error:
            raise KvTransferError(f"the receiver of {name} went away", "cut") from error
        if confirmed == GOT_IT:
            self.traffic.sent += 1
            self._taken(seq)


class _Sending:
    """Sends the entries of one sequence from token `at` on, as they become available, then its first token."""

    def __init__(
        self,
        seq: Seq,
        at: int,
        writer: asyncio.StreamWriter,
        store: KvStore,
        progress: KvProgress,
        traffic: KvTraffic,
        turns: Turns,
    ) -> None:
        self._turns = turns
        self._seq, self._at = seq, at
        self._writer, self._store, self._progress, self._traffic = writer, store, progress, traffic
        self._gone: Callable[[], bool] = lambda: False
        self._early = 0  # bytes
        self._clock = asyncio.get_running_loop().time
        self._said_at = self._clock()

    async def run(self, gone: Callable[[], bool]) -> bool:
        """Send everything. False: the sequence ended without a first token, which the receiver was told unless it is
        `gone`. Raises KvTransferError, TimeoutError."""
        self._gone, seq = gone, self._seq
        while self._at < seq.prompt_tokens:
            if not await self._until(lambda: self._progress.coming(seq) > self._at):
                return False
            stop = min(self._progress.coming(seq), seq.prompt_tokens)
            for layer in range(self._store.layers):
                if not await self._until(partial(self._progress.is_written, seq, layer, stop)):
                    return False
                await self._layer(layer, stop, await self._turns.next(gone))
            self._at = stop
        if not await self._until(lambda: seq.state is SeqState.FINISHED):
            return False
        if seq.finish is not FinishReason.LENGTH or not seq.token_ids or not seq.output_tokens:
            write_frame(self._writer, {"error": f"nothing of {seq.id} is left to decode"})
            return False
        told = {"first_token": int(seq.token_ids[-1]), "early_bytes": self._early, **self._turns.figures()}
        write_frame(self._writer, told)
        await drained(self._writer)
        return True

    async def _until(self, ready: Callable[[], bool]) -> bool:
        """Wait until the entries are computed. False if they never will be."""
        while not ready():
            self._turns.waits()
            if self._seq.state is SeqState.FINISHED:
                write_frame(self._writer, {"error": f"the KV of {self._seq.id} is gone", "lost": True})
                return False
            if self._clock() >= self._said_at + STILL_S:  # by the clock, since a busy event loop polls less often
                self._said_at = self._clock()
                write_frame(self._writer, {"computing": True})
                await drained(self._writer)
            if self._gone() or self._writer.is_closing():
                raise KvTransferError(f"the receiver of {self._seq.id} went away", "cut")
            await asyncio.sleep(LOOK_S)
        return True

    async def _layer(self, layer: int, stop: int, about: dict[str, int]) -> None:
        write_frame(self._writer, {"layer": layer, "start": self._at, "stop": stop, **about})
        step = max(1, PIECE_BYTES // self._store.token_bytes)
        check = 0
        for at in range(self._at, stop, step):
            end = min(at + step, stop)
            if not self._progress.is_written(self._seq, layer, end):
                raise KvTransferError(f"the KV of {self._seq.id} was released while it was sent", "cut")
            piece = self._store.read(self._seq, layer, at, end)
            check = zlib.crc32(piece, check)
            write(self._writer, piece)
            self._traffic.sent_bytes += len(piece)
            if self._seq.state is not SeqState.FINISHED:
                self._early += len(piece)
            await drained(self._writer)
            self._turns.sent(len(piece))
        write(self._writer, check.to_bytes(4, "big"))
