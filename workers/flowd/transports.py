"""Adapters by which transfers over Mooncake or NCCL take their turn on a shared link, for engines that move KV so.

Neither library can hold what it was given, so a transfer is cut into pieces and each piece is given when the daemon
permits it (`paced`). A piece that was given cannot be called back: its size bounds how long a more urgent transfer
waits. Packets cannot be marked for each transfer: both libraries choose the traffic class once, when they start.

The libraries themselves are not imported: their objects come in and are used as `MooncakeEngine` and `NcclCommunicator`
say, which is what vLLM 0.32 uses of `mooncake.engine.TransferEngine` and has in its `PyNcclCommunicator`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Sequence
from typing import Any, NamedTuple, Protocol

from controller.core.errors import SlacklineError
from workers.flowd.client import Flow

PIECE_BYTES = 4 << 20  # 0.3 ms at 100 Gb/s, 3 ms at 10 Gb/s


class TransportFailed(SlacklineError):
    """The library reported an error, or the memory is none that it may read. The transfer is lost."""


class FlowPiece(NamedTuple):
    """A part of the sender's memory, from byte `at` of it on."""

    at: int
    size: int


class PacedTransport(Protocol):
    """Sends the memory of one transfer to one receiver."""

    @property
    def size(self) -> int:
        """Bytes in all."""
        ...

    def send(self, piece: FlowPiece) -> None:
        """Return when the piece has left this memory. Called for each piece in order, on a thread. Raises
        TransportFailed."""
        ...


def pieces(size: int, piece_bytes: int = PIECE_BYTES) -> Iterator[FlowPiece]:
    """How a transfer is cut: both ends of an NCCL transfer have to cut it alike. Raises ValueError."""
    if piece_bytes <= 0:
        raise ValueError(f"pieces of {piece_bytes} bytes")
    for at in range(0, size, piece_bytes):
        yield FlowPiece(at, min(piece_bytes, size - at))


async def paced(
    flow: Flow,
    transport: PacedTransport,
    still: Callable[[], Awaitable[None]],
    pressed: Callable[[], bool] = lambda: False,
    piece_bytes: int = PIECE_BYTES,
) -> None:
    """Send it all, as the daemon permits. `still`, `pressed`: as for `Flow.turn`. Ends the flow in any case. When it
    is cancelled, it returns after the piece that is on its way, whose memory is in use until then. Raises
    TransportFailed, and what `still` raises."""
    try:
        for piece in pieces(transport.size, piece_bytes):
            await flow.turn(still, pressed)
            await _whole(asyncio.get_running_loop().run_in_executor(None, transport.send, piece))
            flow.sent(piece.size)
    finally:
        flow.end()


async def _whole(sending: asyncio.Future[None]) -> None:
    """However often it is cancelled meanwhile. What the library then reports is of no use to anybody."""
    cancelled: asyncio.CancelledError | None = None
    while not sending.done():
        try:
            await asyncio.wait([sending])
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is not None:
        sending.exception()  # or asyncio would log that nobody asked for it
        raise cancelled
    sending.result()


# ---- Mooncake -------------------------------------------------------------------------------------------------------


class MooncakeEngine(Protocol):
    """`mooncake.engine.TransferEngine`, initialized, with its names of parameters. Each call returns 0, or a negative
    error code. A write to a receiver that is gone fails at once, one to a receiver that hangs after 30 s without a
    byte (version 0.3.13 over TCP)."""

    def batch_register_memory(self, buffer_addresses: list[int], capacities: list[int]) -> int: ...

    def batch_transfer_sync_write(
        self, target_hostname: str, buffers: list[int], peer_buffer_addresses: list[int], lengths: list[int]
    ) -> int: ...


class Region(NamedTuple):
    """Memory that lies together: its address here and at the receiver, and its bytes."""

    here: int
    there: int
    size: int


class MooncakeTransport:
    """Writes `regions`, one after the other, into the memory of the engine whose session is `session` (`host:port`).
    The regions have to be registered at both ends (`register`)."""

    def __init__(self, engine: MooncakeEngine, session: str, regions: Sequence[Region]) -> None:
        self._engine, self._session, self._regions = engine, session, regions

    @property
    def size(self) -> int:
        return sum(region.size for region in self._regions)

    def send(self, piece: FlowPiece) -> None:
        parts = list(self._within(piece))
        if sum(part.size for part in parts) != piece.size:
            raise TransportFailed(f"byte {piece.at + piece.size} is beyond the {self.size} bytes of the transfer")
        here, there, sizes = ([part[column] for part in parts] for column in range(3))
        if code := self._engine.batch_transfer_sync_write(self._session, here, there, sizes):
            raise TransportFailed(f"Mooncake could not write to {self._session}: code {code}")

    def _within(self, piece: FlowPiece) -> Iterator[Region]:
        """The parts of the regions that the piece consists of."""
        first = 0
        for here, there, size in self._regions:
            begin, end = max(piece.at, first), min(piece.at + piece.size, first + size)
            if begin < end:
                yield Region(here + begin - first, there + begin - first, end - begin)
            first += size


def register(engine: MooncakeEngine, regions: Sequence[tuple[int, int]]) -> None:
    """Let Mooncake read and write memory, given as address and bytes. Once, before the first transfer. Raises
    TransportFailed."""
    if code := engine.batch_register_memory([at for at, _ in regions], [size for _, size in regions]):
        raise TransportFailed(f"Mooncake could not register {len(regions)} regions: code {code}")


# ---- NCCL -----------------------------------------------------------------------------------------------------------


class NcclCommunicator(Protocol):
    """vLLM's `PyNcclCommunicator`: a tensor of the communicator's device, a rank, and a CUDA stream. It returns once
    the send is queued on the stream. `disabled`: it has no NCCL or no other rank, and `send` then does nothing."""

    disabled: bool

    def send(self, tensor: Any, dst: int, stream: Any = None) -> None: ...


class NcclTransport:
    """Sends a flat tensor of bytes to rank `to`. The receiver posts a `recv` for each of `pieces`, in order: a send
    without one blocks the stream, so `stream` must be one on which nothing else runs. NCCL has no time-out: if the
    receiver is gone, the send ends once its communicator is aborted."""

    def __init__(self, communicator: NcclCommunicator, to: int, tensor: Any, stream: Any) -> None:
        if tensor.dim() != 1 or tensor.element_size() != 1 or not tensor.is_contiguous():
            raise TransportFailed("NCCL sends a flat, contiguous tensor of bytes")
        if communicator.disabled:
            raise TransportFailed("the communicator of NCCL is disabled: it would send nothing and report no error")
        self._communicator, self._to, self._tensor, self._stream = communicator, to, tensor, stream

    @property
    def size(self) -> int:
        return int(self._tensor.numel())

    def send(self, piece: FlowPiece) -> None:
        if piece.at + piece.size > self.size:
            raise TransportFailed(f"byte {piece.at + piece.size} is beyond the {self.size} bytes of the transfer")
        try:
            self._communicator.send(self._tensor[piece.at : piece.at + piece.size], self._to, self._stream)
            self._stream.synchronize()
        except RuntimeError as error:  # what NCCL's errors are, and CUDA's
            raise TransportFailed(f"NCCL could not send to rank {self._to}: {error}") from error
