"""Transfers over Mooncake and NCCL take their turn: against fakes that hold to what the libraries demand."""

from __future__ import annotations

import asyncio
import ctypes
import gc
import threading
from collections import deque
from typing import Any

import pytest

from tests.waiting import until_on_loop
from tests.workers.flowd.running import connected, nothing, sending, serving
from workers.flowd.client import SCHEDULED, FlowClient
from workers.flowd.transports import (
    FlowPiece,
    MooncakeTransport,
    NcclTransport,
    Region,
    TransportFailed,
    paced,
    pieces,
    register,
)

SESSION = "10.0.0.2:12001"


class FakeMooncake:
    """As `mooncake.engine.TransferEngine`: integers and lists of one length, registered memory only, error codes and
    no exceptions; bytes are really copied."""

    def __init__(self) -> None:
        self.registered: list[range] = []
        self.writes: list[int] = []
        self.fails = 0

    def batch_register_memory(self, addresses: list[int], sizes: list[int]) -> int:
        assert len(addresses) == len(sizes)
        if any(size <= 0 for size in sizes):
            return -1
        self.registered += [range(at, at + size) for at, size in zip(addresses, sizes, strict=True)]
        return 0

    def batch_transfer_sync_write(
        self, session: str, sources: list[int], destinations: list[int], sizes: list[int]
    ) -> int:
        assert all(type(each) is list for each in (sources, destinations, sizes))
        assert len(sources) == len(destinations) == len(sizes) > 0
        if self.fails or session != SESSION:
            return self.fails or -2
        for here, there, size in zip(sources, destinations, sizes, strict=True):
            if not all(self._whole(at, size) for at in (here, there)):
                return -3
            ctypes.memmove(there, here, size)
        self.writes.append(sum(sizes))
        return 0

    def _whole(self, at: int, size: int) -> bool:
        return size > 0 and any(at in known and at + size - 1 in known for known in self.registered)


class Memory:
    """Two buffers at either end, of which the second continues the first."""

    def __init__(self, sizes: tuple[int, ...] = (1000, 500)) -> None:
        self.here = [ctypes.create_string_buffer(bytes((7 * at) % 251 for at in range(size)), size) for size in sizes]
        self.there = [ctypes.create_string_buffer(size) for size in sizes]
        self.regions = [
            Region(ctypes.addressof(one), ctypes.addressof(other), len(one))
            for one, other in zip(self.here, self.there, strict=True)
        ]

    def registered_in(self, engine: FakeMooncake) -> None:
        register(engine, [(region.here, region.size) for region in self.regions])
        register(engine, [(region.there, region.size) for region in self.regions])

    def equal(self) -> bool:
        return [each.raw for each in self.here] == [each.raw for each in self.there]


def test_pieces_cover_all_bytes_once() -> None:
    assert list(pieces(10, 4)) == [FlowPiece(0, 4), FlowPiece(4, 4), FlowPiece(8, 2)]
    assert list(pieces(0)) == []
    with pytest.raises(ValueError, match="0 bytes"):
        list(pieces(10, 0))


async def test_mooncake_writes_across_regions() -> None:
    engine, memory = FakeMooncake(), Memory()
    memory.registered_in(engine)
    flow = FlowClient("/nowhere").submit(3, 1500, "host", 1.0)
    await paced(flow, MooncakeTransport(engine, SESSION, memory.regions), nothing, piece_bytes=400)
    assert engine.writes == [400, 400, 400, 300]
    assert memory.equal()
    assert flow.left == 0


def test_mooncakes_errors_are_ours() -> None:
    engine, memory = FakeMooncake(), Memory()
    transport = MooncakeTransport(engine, SESSION, memory.regions)
    with pytest.raises(TransportFailed, match="code -3"):
        transport.send(FlowPiece(0, 10))
    memory.registered_in(engine)
    with pytest.raises(TransportFailed, match="code -2"):
        MooncakeTransport(engine, "10.0.0.9:1", memory.regions).send(FlowPiece(0, 10))
    with pytest.raises(TransportFailed, match="beyond the 1500 bytes"):
        transport.send(FlowPiece(1400, 200))
    with pytest.raises(TransportFailed, match="could not register"):
        register(engine, [(1, 0)])
    assert engine.writes == []


class FakeTensor:
    """What the adapter uses of a torch tensor."""

    def __init__(self, data: bytes, width: int = 1, dims: int = 1, *, together: bool = True) -> None:
        self.data, self._width, self._dims, self._together = data, width, dims, together

    def dim(self) -> int:
        return self._dims

    def element_size(self) -> int:
        return self._width

    def is_contiguous(self) -> bool:
        return self._together

    def numel(self) -> int:
        return len(self.data) // self._width

    def __getitem__(self, part: slice) -> FakeTensor:
        return FakeTensor(self.data[part])


class FakeNccl:
    """Two ranks. A send is queued on its stream and ends with a `recv` of the same size, in order; NCCL hangs or
    reports an error where sizes differ, and the fake reports it."""

    def __init__(self) -> None:
        self.posted: deque[int] = deque()
        self.got = b""

    def recv(self, size: int) -> None:
        self.posted.append(size)

    def send(self, tensor: FakeTensor, dst: int, stream: Any = None) -> None:
        assert dst == 1
        assert stream is not None
        stream.queued.append(lambda: self._pair(tensor.data))

    def _pair(self, data: bytes) -> None:
        if not self.posted or self.posted.popleft() != len(data):
            raise RuntimeError("NCCL error: invalid argument")
        self.got += data


class FakeStream:
    def __init__(self) -> None:
        self.queued: deque[Any] = deque()

    def synchronize(self) -> None:
        while self.queued:
            self.queued.popleft()()


async def test_nccl_sends_what_the_receiver_posts() -> None:
    nccl, data = FakeNccl(), bytes(range(200)) * 5
    for piece in pieces(len(data), 300):
        nccl.recv(piece.size)
    flow = FlowClient("/nowhere").submit(3, len(data), "host", 1.0)
    await paced(flow, NcclTransport(nccl, 1, FakeTensor(data), FakeStream()), nothing, piece_bytes=300)
    assert nccl.got == data
    assert not nccl.posted


@pytest.mark.parametrize("tensor", [FakeTensor(b"12", 2), FakeTensor(b"1", dims=2), FakeTensor(b"1", together=False)])
def test_nccl_takes_flat_bytes_only(tensor: FakeTensor) -> None:
    with pytest.raises(TransportFailed, match="flat, contiguous"):
        NcclTransport(FakeNccl(), 1, tensor, FakeStream())


async def test_an_error_of_nccl_ends_the_flow(path: str) -> None:
    async with serving(path) as daemon, connected(path) as client:
        flow = client.submit(3, 100, "host", 1.0)
        with pytest.raises(TransportFailed, match="rank 1: NCCL error"):
            await paced(flow, NcclTransport(FakeNccl(), 1, FakeTensor(bytes(100)), FakeStream()), nothing)
        await until_on_loop(lambda: not daemon.status()["flows"])


async def test_between_two_pieces_a_transfer_waits_for_a_more_urgent_one(path: str) -> None:
    engine, memory = FakeMooncake(), Memory()
    memory.registered_in(engine)
    async with serving(path, "earliest_deadline"), connected(path) as client, connected(path) as other:
        async with sending(other):
            flow = client.submit(3, 1500, "host", 25.0)
            moving = asyncio.ensure_future(
                paced(flow, MooncakeTransport(engine, SESSION, memory.regions), nothing, piece_bytes=100)
            )
            await asyncio.sleep(0.7)
            assert engine.writes == []
        await moving
    assert memory.equal()
    assert (flow.reason, flow.held_s > 0.5) == (SCHEDULED, True)


class Slow:
    """A transport whose sends last until `go_on`, and fail if they are told to."""

    size = 300

    def __init__(self, error: Exception | None = None) -> None:
        self.began, self.go_on, self.sent = threading.Event(), threading.Event(), list[FlowPiece]()
        self._error = error

    def send(self, piece: FlowPiece) -> None:
        self.began.set()
        assert self.go_on.wait(10.0)
        self.sent.append(piece)
        if self._error is not None:
            raise self._error


async def moving_over(slow: Slow) -> asyncio.Task[None]:
    """A transfer whose first piece is on its way."""
    flow = FlowClient("/nowhere").submit(3, slow.size, "host", 1.0)
    moving = asyncio.create_task(paced(flow, slow, nothing, piece_bytes=100))
    await until_on_loop(slow.began.is_set)
    return moving


@pytest.mark.parametrize("times", [1, 3])
async def test_a_cancelled_transfer_ends_after_its_piece(times: int) -> None:
    """Its memory is in use until then, also if a shutdown cancels it again."""
    slow = Slow()
    moving = await moving_over(slow)
    for _ in range(times):
        moving.cancel()
        await asyncio.sleep(0.05)
    ended_early = moving.done()
    slow.go_on.set()
    with pytest.raises(asyncio.CancelledError):
        await moving
    assert not ended_early
    assert slow.sent == [FlowPiece(0, 100)]


def test_an_error_after_the_cancel_is_not_left_to_the_log() -> None:
    """asyncio complains of it at the latest when its loop is closed, hence a loop of the test's own."""
    complaints: list[str] = []

    async def fails() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda loop, said: complaints.append(said["message"]))
        slow = Slow(TransportFailed("code -1"))
        moving = await moving_over(slow)
        moving.cancel()
        await asyncio.sleep(0.05)
        slow.go_on.set()
        with pytest.raises(asyncio.CancelledError):
            await moving

    asyncio.run(fails())
    gc.collect()
    assert complaints == []
