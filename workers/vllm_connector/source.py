"""The side that sends: a listener for other servers, which ask for KV by its secret.

After the greeting (`workers.engine.kv.wire`) a connection serves one operation, `take` or `drop`. The answer to a
`take` names the layout; each layer follows as a frame, the bytes of its blocks and their CRC-32; then a frame with the
figures of the transfer, which the receiver confirms with one byte. While the transfer daemon holds the transfer, a
frame says so at once and then each second. KV is kept until a receiver has confirmed it or its lease is over; a broken
transfer can be asked for again.
"""

from __future__ import annotations

import asyncio
import logging
import re
import socket
import zlib
from collections.abc import Callable, Coroutine
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from controller.flow.flows import FlowStage
from workers.engine.kv.unproven_connections import UnprovenConnections
from workers.engine.kv.wire import (
    BUFFER_BYTES,
    GOT_IT,
    PIECE_BYTES,
    TAKEN_S,
    KvTransferError,
    as_class,
    be_greeted,
    drained,
    keep_alive,
    read_frame,
    write,
    write_frame,
)
from workers.flowd.client import Flow, FlowClient
from workers.http.fleet_proof import address
from workers.vllm_connector.blocks import CacheBlocks
from workers.vllm_connector.figures import KvFigures
from workers.vllm_connector.plan import Kept
from workers.vllm_connector.settings import ConnectorSettings

UNSENT_BYTES = 128 << 10
# vLLM 0.32 calls a request by its endpoint, the name that was sent, its place among several prompts, and a random part.
NAMED = re.compile(r"(?:cmpl-(.+)-\d+|chatcmpl-(.+))-[0-9a-f]{8}")
ASK_S = 5.0  # until a connected receiver has asked
KNOWN_S = 1.0  # an offer may be used before this server's next step, with which the worker learns of it
LOOK_S = 0.005
BUSY_S = 2.0  # for KV that is being sent: until a receiver that is gone is known to be, and the next one gets it
TOLD_S = 0.05  # within which the daemon says whether a transfer may go; then its receiver is told that it is held
FULL = 0.95  # share of KV blocks in use from which a transfer counts as urgent
log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Held:
    """KV that waits, or is `sending`. `lease`: ends it."""

    kept: Kept
    lease: asyncio.TimerHandle | None
    sending: bool = False


class KvSource:
    """`freed`: called with the request's id once its blocks may be used again. All on one event loop."""

    def __init__(
        self,
        settings: ConnectorSettings,
        blocks: CacheBlocks,
        client: FlowClient | None,
        figures: KvFigures,
        freed: Callable[[str], None],
    ) -> None:
        self.kv_usage = 0.0
        self._settings, self._blocks, self._client = settings, blocks, client
        self._figures, self._freed = figures, freed
        self._held: dict[str, _Held] = {}
        self._unproven = UnprovenConnections()
        self._hosts = frozenset[str]()
        self._server: asyncio.Server | None = None
        self._open: set[asyncio.StreamWriter] = set()

    async def start(self) -> None:
        """Listen. Raises OSError."""
        host, port = self._settings.host, self._settings.port
        self._server = await asyncio.start_server(self._serve, host, port, limit=BUFFER_BYTES)

    def close(self) -> None:
        if self._server is not None:
            self._server.close()
        for writer in list(self._open):
            writer.transport.abort()

    def keep(self, kept: Kept) -> None:
        held = _Held(kept, None)
        held.lease = asyncio.get_running_loop().call_later(self._settings.lease_s, self._expired, held)
        self._held[kept.secret] = held

    def __len__(self) -> int:
        return len(self._held)

    def _expired(self, held: _Held) -> None:
        """What is being sent is freed when that has ended."""
        held.lease = None
        if not held.sending:
            log.warning("nobody loaded the KV of %s within %g s", held.kept.request_id, self._settings.lease_s)
            self._figures.expired += 1
            self._free(held)

    def _free(self, held: _Held) -> None:
        if self._held.pop(held.kept.secret, None) is None:
            return
        if held.lease is not None:
            held.lease.cancel()
        self._freed(held.kept.request_id)

    # ---- a connection -----------------------------------------------------------------------------------------------

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._open.add(writer)
        self._unproven.come(writer)
        known = False
        try:
            keep_alive(writer)
            await self._from_peer(writer)
            names = {address(self._settings.host, self._settings.port)}
            await be_greeted(reader, writer, self._settings.token, names)
            known = True
            self._unproven.go(writer)
            async with asyncio.timeout(ASK_S):
                asked = await read_frame(reader)
            await self._answer(asked, reader, writer)
        except (OSError, asyncio.IncompleteReadError, TimeoutError, KvTransferError) as error:
            if known:
                self._figures.failed += 1
                log.warning("a KV transfer ended early: %s", error or type(error).__name__)
            else:
                self._unproven.failed(error)
            writer.transport.abort()
        except Exception:  # a defect; the receiver computes the KV
            self._figures.failed += 1
            log.exception("a KV transfer failed unexpectedly")
        finally:
            self._open.discard(writer)
            self._unproven.go(writer)
            writer.close()
            with suppress(OSError):
                await writer.wait_closed()

    async def _from_peer(self, writer: asyncio.StreamWriter) -> None:
        """Raises KvTransferError for a host that is none of the peers'. Names are looked up again when an address is
        new, since a peer may have come back with another one."""
        host = str(writer.get_extra_info("peername")[0])
        if host in self._hosts:
            return
        found = set[str]()
        for name in self._settings.peer_hosts:
            with suppress(OSError):
                known = await asyncio.get_running_loop().getaddrinfo(name, None, type=socket.SOCK_STREAM)
                found.update(str(each[4][0]) for each in known)
        self._hosts = frozenset(found)
        if host not in self._hosts:
            raise KvTransferError(f"{host} is none of the peers of this server", "refused")

    async def _answer(self, asked: dict[str, Any], reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        held = await self._of(asked.get("kv"), asked.get("op"))
        if held is None:
            write_frame(writer, {"error": "this KV is not kept here, or no longer", "lost": True})
        elif asked.get("op") == "drop":
            self._drop(held)
            write_frame(writer, {"ok": True})
        elif held.sending:
            write_frame(writer, {"error": "this KV is being sent"})
        elif asked.get("op") != "take":
            write_frame(writer, {"error": f"unknown op {str(asked.get('op'))[:100]!r}"})
        elif asked.get("layout") != self._blocks.layout:
            write_frame(writer, {"error": f"the KV here is {self._blocks.layout}", "other_model": True})
        else:
            await self._give(held, asked, reader, writer)
        await drained(writer)

    def _drop(self, held: _Held) -> None:
        """What is being sent is freed when that has ended: its receiver has asked first, or is gone."""
        if held.lease is not None:
            held.lease.cancel()
            held.lease = None
        if not held.sending:
            self._free(held)

    async def _of(self, secret: Any, op: Any) -> _Held | None:
        """The KV, once it is known here and, if it is to be taken, nobody else takes it: as far as that is soon."""
        if not isinstance(secret, str):
            return None
        now = asyncio.get_running_loop().time
        known_by, free_by = now() + KNOWN_S, now() + BUSY_S
        while (held := self._held.get(secret)) is None and now() < known_by:
            await asyncio.sleep(LOOK_S)
        while op == "take" and held is not None and held.sending and now() < free_by:
            await asyncio.sleep(LOOK_S)
            held = self._held.get(secret)
        return held

    async def _give(
        self, held: _Held, asked: dict[str, Any], reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        start, blocks = asked.get("start"), held.kept.blocks
        if isinstance(start, bool) or not isinstance(start, int) or not 0 <= start < len(blocks):
            write_frame(writer, {"error": f"start must be between 0 and {len(blocks) - 1}"})
            return
        wanted = blocks[start:]
        write_frame(writer, {"blocks": len(wanted), "layout": self._blocks.layout})
        flow = self._flow(held, len(wanted) * self._blocks.block_bytes, asked, writer)
        held.sending = True
        try:
            sending = _Sending(self._blocks, wanted, flow, writer, lambda: self._pressed(asked))
            confirmed = await _confirmed(sending.run(), reader)
        finally:
            held.sending = False
            self._figures.ended(flow)
            if flow is not None:
                flow.end()
            if held.lease is None:
                self._free(held)
        if confirmed == GOT_IT:
            self._figures.sent += 1
            self._figures.sent_bytes += len(wanted) * self._blocks.block_bytes
            self._free(held)

    def _pressed(self, asked: dict[str, Any]) -> bool:
        return self.kv_usage >= FULL or asked.get("pressed") is True

    def _flow(self, held: _Held, size: int, asked: dict[str, Any], writer: asyncio.StreamWriter) -> Flow | None:
        """None without flow scheduling."""
        if self._client is None or self._client.off:
            return None
        due = asked.get("due_in_s")
        due_in_s = float(due) if isinstance(due, int | float) and -1e6 < due < 1e6 else None
        to = str(writer.get_extra_info("peername")[0])
        flow = self._client.submit(FlowStage.KV_TRANSFER, size, to, due_in_s, name_of(held.kept.request_id)[:200])
        if flow.scheduled:
            writer.transport.set_write_buffer_limits(0)
            writer.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, UNSENT_BYTES)
        return flow


def name_of(request_id: str) -> str:
    """The name under which the gateway sent a request, which orders and records know it by; what vLLM calls it if that
    has another form."""
    found = NAMED.fullmatch(request_id)
    return request_id if found is None else found[1] or found[2]


async def _confirmed(sending: Coroutine[Any, Any, None], reader: asyncio.StreamReader) -> bytes:
    """Send, and return what the receiver says to it. A receiver that goes away ends it at once, or the next one would
    be refused. Raises KvTransferError, OSError, TimeoutError."""
    said = asyncio.ensure_future(reader.readexactly(len(GOT_IT)))
    moving = asyncio.ensure_future(sending)
    try:
        await asyncio.wait((said, moving), return_when=asyncio.FIRST_COMPLETED)
        if not said.done() or said.exception() is None:  # it may confirm before the end is seen here
            await moving
        async with asyncio.timeout(TAKEN_S):
            return await said
    except asyncio.IncompleteReadError:
        raise KvTransferError("the receiver went away", "cut") from None
    finally:
        said.cancel()
        moving.cancel()
        await asyncio.gather(said, moving, return_exceptions=True)


class _Sending:
    """Sends blocks layer by layer, as the transfer daemon permits it. `flow`: None without one; then nothing waits."""

    def __init__(
        self,
        cache: CacheBlocks,
        blocks: tuple[int, ...],
        flow: Flow | None,
        writer: asyncio.StreamWriter,
        pressed: Callable[[], bool],
    ) -> None:
        self._cache, self._blocks, self._flow = cache, blocks, flow
        self._writer, self._pressed = writer, pressed
        self._class: int | None = None

    async def run(self) -> None:
        """Raises KvTransferError, OSError, TimeoutError."""
        for layer in range(self._cache.layers):
            await self._layer(layer, await self._turn())
        ended: dict[str, Any] = {"done": True}
        if self._flow is not None:
            flow = self._flow
            ended |= {"held_s": flow.held_s, "promotions": flow.promotions, "level": flow.level, "flow": flow.reason}
        write_frame(self._writer, ended)
        await drained(self._writer)

    async def _turn(self) -> dict[str, int]:
        """Return once the next layer may be sent, with what its frame says of the class of its packets."""
        if self._flow is None:
            return {}
        await drained(self._writer)  # what is held must not lie in front of what may go
        with suppress(TimeoutError):
            async with asyncio.timeout(TOLD_S):
                await self._flow.answered()
        if not self._flow.may_send:
            await self._still()
        await self._flow.turn(self._still, self._pressed)
        if self._flow.wire_class is None or self._flow.wire_class == self._class:
            return {}
        self._class = self._flow.wire_class
        as_class(self._writer, self._class)
        return {"class": self._class}

    async def _still(self) -> None:
        write_frame(self._writer, {"held": True})
        await drained(self._writer)

    async def _layer(self, layer: int, about: dict[str, int]) -> None:
        each = self._cache.layer_bytes(layer)
        write_frame(self._writer, {"layer": layer, "bytes": each * len(self._blocks), **about})
        step, check = max(1, PIECE_BYTES // each), 0
        for at in range(0, len(self._blocks), step):
            piece = self._cache.read(layer, self._blocks[at : at + step])
            check = zlib.crc32(piece, check)
            write(self._writer, piece)
            await drained(self._writer)
            if self._flow is not None:
                self._flow.sent(len(piece))
        write(self._writer, check.to_bytes(4, "big"))
