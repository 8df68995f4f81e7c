"""The side that loads: asks another server for KV, layer by layer, and writes it into this server's blocks.

What comes is checked before it is believed: layout, layer numbers and sizes, and a CRC-32 for each layer. A transfer
that fails leaves blocks half written; vLLM is told of them and computes them.
"""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import Callable
from typing import Any

from controller.core.kv_links import KvMoved
from workers.engine.kv.progress import KvArrivals
from workers.engine.kv.wire import (
    CLASSES,
    GOT_IT,
    PIECE_BYTES,
    STALL_S,
    KvTransferError,
    as_class,
    as_transfer_errors,
    connect,
    read_frame,
    write,
    write_frame,
)
from workers.vllm_connector.blocks import CacheBlocks
from workers.vllm_connector.plan import KvLoad, PromptOffer

CONNECT_S = 3.0
LONGEST_REASON = 32  # characters, for why a transfer was not scheduled


async def pull(
    load: KvLoad, blocks: CacheBlocks, token: str, due_in_s: float | None, held: Callable[[], None], *, pressed: bool
) -> KvMoved:
    """Load it. `due_in_s`: until it is needed. `held`: called whenever the sender says that it is. Its figures, but for
    its duration and what the engine computes meanwhile. Raises KvTransferError."""
    offer = load.offer
    with as_transfer_errors(f"{offer.host}:{offer.port}", "unreachable"):
        reader, writer = await connect(offer.host, offer.port, token, CONNECT_S)
        try:
            asked: dict[str, Any] = {"op": "take", "kv": offer.secret, "start": load.start, "layout": blocks.layout}
            if due_in_s is not None:
                asked["due_in_s"] = due_in_s
            write_frame(writer, {**asked, "pressed": pressed})
            return await _Pulling(load, blocks, reader, writer, held).run()
        finally:
            writer.close()


async def drop(offer: PromptOffer, token: str) -> None:
    """Tell the sender that nobody will load it. Raises KvTransferError, OSError, TimeoutError, IncompleteReadError; the
    lease then frees it."""
    reader, writer = await connect(offer.host, offer.port, token, CONNECT_S)
    try:
        write_frame(writer, {"op": "drop", "kv": offer.secret})
        async with asyncio.timeout(STALL_S):
            await read_frame(reader)
    finally:
        writer.close()


class _Pulling:
    def __init__(
        self,
        load: KvLoad,
        blocks: CacheBlocks,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        held: Callable[[], None],
    ) -> None:
        self._load, self._cache, self._held = load, blocks, held
        self._reader, self._writer = reader, writer
        self._arrivals = KvArrivals()

    async def run(self) -> KvMoved:
        await self._agreed()
        for layer in range(self._cache.layers):
            await self._layer(layer)
        told = await self._frame()
        if told.get("done") is not True:
            raise KvTransferError("the sender did not say that it is done", "corrupt")
        came = self._arrivals.over()
        write(self._writer, GOT_IT)
        return self._moved(told)._replace(**came._asdict())

    def _moved(self, told: dict[str, Any]) -> KvMoved:
        """`told`: what the sender measured; without flow scheduling nothing."""
        cached = self._load.start * self._cache.block_tokens
        reason = told.get("flow")
        return KvMoved(
            bytes=len(self._load.blocks) * self._cache.block_bytes,
            layers=self._cache.layers,
            tokens=self._load.offer.tokens - cached,
            cached=cached,
            reserved=True,
            held_s=_number(told.get("held_s")),
            promotions=int(_number(told.get("promotions"))),
            level=int(_number(told.get("level"))),
            flow=reason[:LONGEST_REASON] if isinstance(reason, str) else "",
        )

    async def _agreed(self) -> None:
        """The sender has it, in the same layout and number. Raises KvTransferError."""
        told = await self._frame()
        if told.get("layout") != self._cache.layout:
            raise KvTransferError("the sender's KV is of another layout", "other_model")
        if told.get("blocks") != len(self._load.blocks):
            raise KvTransferError(
                f"{len(self._load.blocks)} blocks were wanted, and the sender has {told.get('blocks')}", "corrupt"
            )

    async def _layer(self, layer: int) -> None:
        told, each = await self._frame(), self._cache.layer_bytes(layer)
        blocks = self._load.blocks
        if told.get("layer") != layer or told.get("bytes") != each * len(blocks):
            raise KvTransferError(f"layer {layer} was expected, of {each * len(blocks)} bytes", "corrupt")
        self._arrivals.layer()
        wire_class = told.get("class")
        if isinstance(wire_class, int) and not isinstance(wire_class, bool) and 0 <= wire_class < CLASSES:
            as_class(self._writer, wire_class)
        step, check = max(1, PIECE_BYTES // each), 0
        for at in range(0, len(blocks), step):
            part = blocks[at : at + step]
            async with asyncio.timeout(STALL_S):
                piece = await self._reader.readexactly(each * len(part))
            check = zlib.crc32(piece, check)
            self._cache.write(layer, part, piece)
        async with asyncio.timeout(STALL_S):
            sum_sent = await self._reader.readexactly(4)
        if int.from_bytes(sum_sent, "big") != check:
            raise KvTransferError(f"layer {layer} came damaged", "corrupt")
        self._arrivals.layer_came(each * len(blocks))

    async def _frame(self) -> dict[str, Any]:
        """The next one that does not merely say that the transfer is held. Raises KvTransferError."""
        while True:
            async with asyncio.timeout(STALL_S):
                told = await read_frame(self._reader)
            if "error" in told:
                reason = "kv_lost" if told.get("lost") is True else "refused"
                reason = "other_model" if told.get("other_model") is True else reason
                raise KvTransferError(f"the sender refused: {str(told['error'])[:300]}", reason)
            if told.get("held") is not True:
                return told
            self._held()


def _number(given: Any) -> float:
    return float(given) if isinstance(given, int | float) and 0 <= given < 1e9 else 0.0
