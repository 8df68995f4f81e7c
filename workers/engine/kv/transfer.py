"""KV transfers over TCP, the side that pulls. `server` is the other side.

After the greeting a connection serves any number of operations: `ping`, `probe` (a number of bytes, to measure
bandwidth) and `take`. The answer to a `take` begins with the fields of the layout that it asked for; engines of older
versions know fewer of them, and the fields that both know are compared. Runs of tokens follow, each of them layer by
layer: a frame that names layer and tokens, their entries in pieces (so that the event loop stays responsive), and their
CRC-32. A prompt that is still being computed is sent as far as it exists; while there is nothing new, or while the
source may not send (`turns`), a frame each second says so. The last frame has the first token, and the receiver
confirms it with one byte. If the connection breaks, the source keeps its KV, which can be pulled again.
"""

from __future__ import annotations

import asyncio
import math
import time
import zlib
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NamedTuple

from controller.core.kv_links import INT64, OTHER_MODEL, moved_from_json
from controller.core.steps import Seq
from workers.engine.kv.digests import HASH_BYTES, MOST_BLOCKS, Digest, digest_of
from workers.engine.kv.progress import Came, KvArrivals
from workers.engine.kv.store import ASKED_FOR, KvMismatch, KvStore, Layout
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
from workers.http.fleet_proof import keyed, proves

PING_S = 3.0  # timeout of a ping
LOOK_S = 0.002  # how often a step that waits for layers is looked at


@dataclass(slots=True)
class KvTraffic:
    """Bytes and transfers since the start. `early_bytes`: those received before their prefill had ended; `receiving_s`:
    total time of successful pulls."""

    sent_bytes: int = 0
    received_bytes: int = 0
    early_bytes: int = 0
    sent: int = 0
    received: int = 0
    failed: int = 0
    receiving_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Offer:
    """Where to pull the KV of a prompt: the prefill engine's `kv_transfer_params`. `engine`: its instance id, "" if
    unknown. `first_token`: None if the prompt was still being computed; it then comes with the KV. `proof`: that an
    engine of the fleet made the offer for this address, so that nobody can have an engine connect to any other one."""

    host: str
    port: int
    request: str
    tokens: int
    first_token: int | None = None
    engine: str = ""
    proof: str = ""

    @staticmethod
    def proof_of(token: str, host: str, port: int, request: str) -> str:
        return keyed(token, "offer", host, str(port), request)

    def of_the_fleet(self, token: str) -> bool:
        return proves(self.proof, token, "offer", self.host, str(self.port), self.request)


async def _ignore() -> None:
    """The default of `Listener.began`."""


@dataclass(frozen=True, slots=True)
class Listener:
    """Callbacks of one pull. `began`: the source has answered and begins to send. `still`: it reports that it still
    computes."""

    began: Callable[[], Awaitable[None]] = _ignore
    still: Callable[[], None] = lambda: None


NOBODY = Listener()


class HeldThere(NamedTuple):
    """What another engine says of a prompt: how many of its tokens it has cached, and for how many seconds its link is
    taken by transfers before (0 from engines of older versions). `digest`: of all that it has cached, if it sent it."""

    tokens: int
    queue_s: float
    digest: Digest | None = None


class Pulled(NamedTuple):
    """The result of a pull: the token that the prefill sampled, the bytes sent before the prefill had ended, the
    seconds of waiting for them, and when KV came. `held`: what the source says of its turns, as fields of KvMoved."""

    first_token: int
    early_bytes: int
    waited_s: float
    came: Came
    held: Mapping[str, Any] = MappingProxyType({})


class KvConnection:
    """An authenticated connection to another engine, for one operation at a time. Close it after any error."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        self.received = 0  # bytes of KV in the current transfer
        self.turns: dict[str, Any] = {}  # what its source said last of its turns on the link, as fields of KvMoved

    @classmethod
    async def open(cls, host: str, port: int, token: str, timeout_s: float) -> KvConnection:
        """Connect and authenticate. Raises KvTransferError."""
        with as_transfer_errors(f"{host}:{port}", "unreachable"):
            return cls(*await connect(host, port, token, timeout_s))

    @property
    def gone(self) -> bool:
        """Whether the other side has closed it, as far as known without a call."""
        return self._reader.at_eof() or self._writer.is_closing()

    def close(self) -> None:
        self._writer.close()

    async def ping(self) -> float:
        """The round-trip time in seconds. Raises KvTransferError."""
        began = time.monotonic()
        await self._ask({"op": "ping"}, PING_S)
        return time.monotonic() - began

    async def probe(self, size: int) -> float:
        """The seconds to receive `size` bytes. Raises KvTransferError."""
        await self._ask({"op": "probe", "bytes": size})
        began = time.monotonic()
        with as_transfer_errors("probe", "cut"):
            for at in range(0, size, PIECE_BYTES):
                await self._read(min(PIECE_BYTES, size - at))
        return time.monotonic() - began

    async def pull(
        self,
        offer: Offer,
        seq: Seq,
        store: KvStore,
        traffic: KvTraffic,
        listener: Listener = NOBODY,
        about: Mapping[str, Any] = MappingProxyType({}),
    ) -> Pulled:
        """Pull the KV of the prompt into the blocks of `seq`, from the first token that is not cached here. `about`:
        what the source is told besides, for its turn on the link: `due_in_s`, `pressed`.

        Raises KvTransferError; then the content of the blocks is invalid.
        """
        self.received = 0
        asked = {"op": "take", "request": offer.request, "start": seq.cached, "layout": ASKED_FOR, **about}
        header = await self._ask(asked)
        layout = store.layout
        _check_header(header, layout, offer.tokens)
        await listener.began()
        at, due, waited_s = seq.cached, 0, 0.0  # first token of the current run, its next layer, seconds
        arrivals = KvArrivals()
        with as_transfer_errors(f"KV of {offer.request} from {offer.host}:{offer.port}", "cut"):
            while True:
                asked_at = time.monotonic()
                frame = await self._frame()
                waited_s += time.monotonic() - asked_at
                if "first_token" in frame:
                    break
                if "computing" in frame:
                    listener.still()
                    continue
                stop = frame.get("stop")
                named = frame.get("layer") == due and frame.get("start") == at
                if not named or not isinstance(stop, int) or not at < stop <= offer.tokens:
                    raise KvTransferError(f"expected layer {due} from token {at}, got {frame}", "corrupt")
                arrivals.layer()
                if (wire_class := frame.get("class")) in range(CLASSES):
                    as_class(self._writer, wire_class)  # for what acknowledges it
                await self._layer(seq, due, at, stop, store, traffic)
                arrivals.layer_came((stop - at) * store.token_bytes)
                at, due = (stop, 0) if due + 1 == store.layers else (at, due + 1)
            came = arrivals.over()
            token, early = frame["first_token"], frame.get("early_bytes")
            if (at, due) != (offer.tokens, 0) or not isinstance(token, int) or not isinstance(early, int):
                raise KvTransferError(f"expected layer {due} from token {at}, got {frame}", "corrupt")
            if not 0 <= token < (layout.vocabulary or INT64):
                raise KvTransferError(f"{token} is not a valid first token", "corrupt")
            write(self._writer, GOT_IT)
            await self._writer.drain()
        traffic.early_bytes += early
        held = _held_in(frame)
        return Pulled(token, early, max(0.0, waited_s - held.get("held_s", 0.0)) if early else 0.0, came, held)

    async def holds(self, prompt: bytes, salt: bytes, within_s: float, *, digest: bool = False) -> HeldThere:
        """What the other engine has of the prompt, and, with `digest`, of all others. `prompt`:
        `lender.tokens_as_bytes`. Raises KvTransferError."""
        said = await self._ask({**_of_prompt("holds", prompt, salt), "digest": digest}, within_s, prompt)
        held, queue_s, size = said.get("holds"), said.get("queue_s", 0.0), said.get("digest_bytes")
        if not isinstance(held, int) or held < 0:
            raise KvTransferError(f"{held!r} is not a number of tokens", "corrupt")
        if not isinstance(queue_s, int | float) or not 0 <= queue_s < math.inf:
            raise KvTransferError(f"{queue_s!r} is not a number of seconds", "corrupt")
        if size is None:  # it has too many blocks, or knows no digests
            return HeldThere(held, float(queue_s))
        if not isinstance(size, int) or not 0 <= size <= HASH_BYTES * MOST_BLOCKS or size % HASH_BYTES:
            raise KvTransferError(f"{size!r} is not the size of a digest", "corrupt")
        block_size = said.get("block_size")
        if not isinstance(block_size, int):
            raise KvTransferError(f"{block_size!r} is not the size of a block", "corrupt")
        with as_transfer_errors("holds", "cut"):
            sent = await self._reader.readexactly(size)
        return HeldThere(held, float(queue_s), digest_of(sent, block_size, asyncio.get_running_loop().time()))

    async def borrow(
        self,
        seq: Seq,
        prompt: bytes,
        store: KvStore,
        traffic: KvTraffic,
        about: Mapping[str, Any],
        came: Callable[[int], None] = lambda layers: None,
        computes: Callable[[], int | None] = lambda: None,
    ) -> dict[str, Any]:
        """Copy the KV of `seq`, a prefix of the prompt, into its blocks, from the first token that is not cached here.
        The prompt goes on for at least a token, as far as the source said that it holds it: its blocks may have another
        size. `about`: what the source is told for its turn on the link; `came`: called with the number of layers that
        are here, after each; `computes`: the layer that is computed here or waits, None before it has begun, of which
        the source is told if it asks. Returns what it says of its turns.

        Raises KvTransferError; then the content of the blocks is invalid.
        """
        self.received, self.turns = 0, {}
        asked = {**_of_prompt("lend", prompt, seq.salt), "start": seq.cached, "stop": seq.tokens}
        asked.update(layout=ASKED_FOR, **about)
        header = await self._ask(asked, STALL_S, prompt)
        _check_header(header, store.layout, seq.tokens)
        layer = 0
        with as_transfer_errors(f"KV of {seq.id}", "cut"), self._telling(computes, header.get("computes") is True):
            while layer < store.layers:
                frame = await self._frame()
                if "computing" in frame:  # held
                    self.turns = _held_in(frame)
                    continue
                if (frame.get("layer"), frame.get("start"), frame.get("stop")) != (layer, seq.cached, seq.tokens):
                    raise KvTransferError(f"expected layer {layer} from token {seq.cached}, got {frame}", "corrupt")
                if (wire_class := frame.get("class")) in range(CLASSES):
                    as_class(self._writer, wire_class)
                await self._layer(seq, layer, seq.cached, seq.tokens, store, traffic)
                layer += 1
                came(layer)
            self.turns = _held_in(await self._frame())
            return self.turns

    @contextmanager
    def _telling(self, computes: Callable[[], int | None], wanted: bool) -> Iterator[None]:
        """Tell the source meanwhile which layer is computed here, and that it is over if all went well."""
        if not wanted:
            yield
            return
        telling = asyncio.get_running_loop().create_task(self._tell(computes))
        try:
            yield
        finally:
            telling.cancel()
        write_frame(self._writer, {"over": True})

    async def _tell(self, computes: Callable[[], int | None]) -> None:
        """Nothing reports passed layers, so they are polled."""
        told = -1
        with suppress(OSError):  # the copy ends by itself then
            while True:
                if (layer := computes()) is not None and layer > told:
                    told = layer
                    write_frame(self._writer, {"layer": layer})
                await asyncio.sleep(LOOK_S)

    async def _layer(self, seq: Seq, layer: int, start: int, stop: int, store: KvStore, traffic: KvTraffic) -> None:
        step = max(1, PIECE_BYTES // store.token_bytes)
        check = 0
        for at in range(start, stop, step):
            piece = await self._read((min(at + step, stop) - at) * store.token_bytes)
            check = zlib.crc32(piece, check)
            self.received += len(piece)
            traffic.received_bytes += len(piece)
            try:
                store.write(seq, layer, at, piece)
            except KvMismatch as error:
                raise KvTransferError(str(error), "corrupt") from error
        if await self._read(4) != check.to_bytes(4, "big"):
            raise KvTransferError(f"the checksum of layer {layer} is wrong", "corrupt")

    async def _ask(self, question: dict[str, Any], within_s: float = STALL_S, data: bytes = b"") -> dict[str, Any]:
        """`data`: follows the question."""
        with as_transfer_errors(str(question["op"]), "cut"):
            write_frame(self._writer, question)
            write(self._writer, data)
            await self._writer.drain()
            return await self._frame(within_s)

    async def _frame(self, within_s: float | None = None) -> dict[str, Any]:
        async with asyncio.timeout(STALL_S if within_s is None else within_s):
            answer = await read_frame(self._reader)
        if "error" in answer:
            reason = "kv_lost" if answer.get("lost") else "refused"
            raise KvTransferError(f"the source refused: {answer['error']}", reason)
        return answer

    async def _read(self, size: int) -> bytes:
        try:
            async with asyncio.timeout(STALL_S):
                return await self._reader.readexactly(size)
        except asyncio.IncompleteReadError as error:
            self.received += len(error.partial)
            raise


def _of_prompt(op: str, prompt: bytes, salt: bytes) -> dict[str, Any]:
    return {"op": op, "tokens": len(prompt) // 8, "salt": salt.hex()}


def _held_in(frame: Mapping[str, Any]) -> dict[str, Any]:
    """What the last frame says of the source's turns; empty without flow scheduling, or from older versions."""
    told = moved_from_json({name: frame[name] for name in ("held_s", "promotions", "level", "flow") if name in frame})
    if told is None or not told.flow or not 0 <= told.held_s < math.inf:
        return {}
    return {"held_s": told.held_s, "promotions": told.promotions, "level": told.level, "flow": told.flow[:40]}


def _check_header(header: dict[str, Any], layout: Layout, tokens: int) -> None:
    """Raises KvTransferError naming the fields that differ. Missing optional fields are accepted, since engines of
    older versions do not know them; otherwise no KV could move while a fleet is upgraded."""
    wanted = {**layout._asdict(), "tokens": tokens}
    known = [name for name in wanted if name in header or name not in ASKED_FOR]
    names = [name for name in known if header.get(name) != wanted[name]]
    if names:
        differ = ", ".join(f"{name} {header.get(name)!r} instead of {wanted[name]!r}" for name in names)
        reason = "refused" if names == ["tokens"] else OTHER_MODEL
        raise KvTransferError(f"the source has another layout: {differ}", reason)
