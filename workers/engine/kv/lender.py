"""Cached prefixes that other engines copy, the side that has them. `prefixes` is the other side.

An engine that is about to compute a prompt sends its tokens and its tenant's salt. They are hashed here, so that a
prefix is found only by who has its tokens, and never across tenants. `holds` asks how many tokens are cached, and how
long this host's link takes for what is queued on it; with `digest`, the answer is followed by what is cached here
(`digests`), if that is not too much. `lend` copies them, layer by layer, from token `start` to `stop`
(without it to the last that is cached), in the frames of a KV transfer (`transfer`). The blocks are in use until then.
If the first frame says `computes`, the borrower reports in frames of its own which layer it computes, and after the
last one that it is `over`: of the copies that leave this host, that of the layer that is needed soonest goes first.
"""

from __future__ import annotations

import asyncio
import sys
import zlib
from array import array
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from controller.core.steps import Lend, Release, Seq
from workers.engine.engine import Engine
from workers.engine.kv.digests import MOST_BLOCKS, digest_bytes
from workers.engine.kv.store import KvStore
from workers.engine.kv.turns import ComputedThere, Turns, TurnsConfig
from workers.engine.kv.wire import PIECE_BYTES, TAKEN_S, KvTransferError, drained, read_frame, write, write_frame

MOST_TOKENS = 1 << 20
MOST_SALT = 4096  # hexadecimal digits
TOKEN_BYTES = 8


def tokens_as_bytes(tokens: array[int]) -> bytes:
    """As they are sent: eight bytes each, the lowest first."""
    if sys.byteorder == "big":
        tokens = tokens[:]
        tokens.byteswap()
    return tokens.tobytes()


@dataclass(slots=True)
class LentTraffic:
    """Since the start: prefixes that were copied from here to their end, and bytes of all copies."""

    lent: int = 0
    bytes: int = 0


class PrefixLender:
    """Answers what other engines ask of the prefix cache of this one."""

    def __init__(self, engine: Engine, store: KvStore, turns: TurnsConfig) -> None:
        self.traffic = LentTraffic()
        self._engine, self._store, self._turns = engine, store, turns

    async def answer(self, asked: dict[str, Any], reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Raises KvTransferError, OSError, TimeoutError. What is wrong with a question the other engine is told."""
        try:
            seq = await self._named(asked, reader)
        except KvTransferError as error:
            write_frame(writer, {"error": str(error)})
            await drained(writer)
            raise
        if asked.get("op") == "holds":
            blocks = self._engine.scheduler.blocks
            held = blocks.cached_tokens(seq)
            answer = {"holds": held, "queue_s": await self._turns.queue_s() if held else 0.0}
            if asked.get("digest") is not True or len(blocks.hashes) > MOST_BLOCKS:
                write_frame(writer, answer)
                return
            digest = digest_bytes(blocks.hashes)
            write_frame(writer, {**answer, "digest_bytes": len(digest), "block_size": blocks.block_size})
            write(writer, digest)
            await drained(writer)
            return
        self._engine.handle(Lend(seq))
        try:
            await self._lend(seq, asked, reader, writer)
        finally:
            self._engine.handle(Release(seq))

    async def _named(self, asked: dict[str, Any], reader: asyncio.StreamReader) -> Seq:
        """A sequence of the tokens and the salt that follow the question."""
        count, salt = asked.get("tokens"), asked.get("salt")
        if isinstance(count, bool) or not isinstance(count, int) or not 0 < count <= MOST_TOKENS:
            raise KvTransferError(f"tokens must be between 1 and {MOST_TOKENS}", "refused")
        tokens = array("q")
        async with asyncio.timeout(TAKEN_S):
            tokens.frombytes(await reader.readexactly(count * TOKEN_BYTES))
        try:
            salted = bytes.fromhex(salt) if isinstance(salt, str) and len(salt) <= MOST_SALT else None
        except ValueError:
            salted = None
        if salted is None:
            raise KvTransferError(f"salt must be at most {MOST_SALT} hexadecimal digits", "refused")
        if sys.byteorder == "big":
            tokens.byteswap()
        engine = self._engine
        return Seq(engine.next_id("lent"), engine.now(), count, 1, token_ids=tokens, salt=salted)

    async def _lend(
        self, seq: Seq, asked: dict[str, Any], reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        start, stop = asked.get("start"), asked.get("stop", seq.computed)
        if not isinstance(start, int) or not isinstance(stop, int) or not 0 <= start < stop <= seq.computed:
            write_frame(writer, {"error": f"{seq.computed} tokens are cached here", "lost": True})
            return
        size = (stop - start) * self._store.layers * self._store.token_bytes
        turns = self._turns.begin_reuse(seq, size, asked, writer)
        hearing: asyncio.Task[None] | None = None
        try:
            header = {**self._store.layout.as_json(asked.get("layout")), "tokens": stop}
            if turns.there is not None and turns.there.wanted:
                header["computes"] = True
                hearing = asyncio.get_running_loop().create_task(self._hear(turns.there, reader))
            write_frame(writer, header)
            await self._send(seq, (start, stop), turns, reader.at_eof, writer)
            if hearing is not None:
                async with asyncio.timeout(TAKEN_S):
                    await hearing
        finally:
            turns.end()
            if hearing is not None:
                hearing.cancel()
                await asyncio.gather(hearing, return_exceptions=True)

    async def _hear(self, there: ComputedThere, reader: asyncio.StreamReader) -> None:
        """Pass on which layer the borrower computes, until it says that it is over. Raises KvTransferError."""
        while not (said := await read_frame(reader)).get("over"):
            layer = said.get("layer")
            if isinstance(layer, bool) or not isinstance(layer, int) or not 0 <= layer < self._store.layers:
                raise KvTransferError(f"layer must be between 0 and {self._store.layers - 1}, not {layer!r}", "corrupt")
            there.computes(layer)

    async def _send(
        self, seq: Seq, tokens: tuple[int, int], turns: Turns, gone: Callable[[], bool], writer: asyncio.StreamWriter
    ) -> None:
        start, stop = tokens
        for layer in range(self._store.layers):
            about = await turns.next(gone, layer)
            write_frame(writer, {"layer": layer, "start": start, "stop": stop, **about})
            check, step = 0, max(1, PIECE_BYTES // self._store.token_bytes)
            for at in range(start, stop, step):
                piece = self._store.read(seq, layer, at, min(at + step, stop))
                check = zlib.crc32(piece, check)
                write(writer, piece)
                self.traffic.bytes += len(piece)
                await drained(writer)
                turns.sent(len(piece))
            write(writer, check.to_bytes(4, "big"))
        write_frame(writer, {"lent": stop, **turns.figures()})
        await drained(writer)
        self.traffic.lent += 1
