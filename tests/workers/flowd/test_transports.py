"""Transfers over NCCL take their turn: against a fake that holds to what the library demands. And any transport."""

from __future__ import annotations

import asyncio
import gc
import threading
from collections import deque
from typing import Any

import pytest

from tests.waiting import until_on_loop
from tests.workers.flowd.running import connected, nothing, serving
from workers.flowd.client import FlowClient
from workers.flowd.transports import (
    FlowPiece,
    NcclTransport,
    TransportFailed,
    paced,
    pieces,
)


def test_pieces_cover_all_bytes_once() -> None:
    assert list(pieces(10, 4)) == [FlowPiece(0, 4), FlowPiece(4, 4), FlowPiece(8, 2)]
    assert list(pieces(0)) == []
    with pytest.raises(ValueError, match="0 bytes"):
        list(pieces(10, 0))


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

    def __init__(self, *, disabled: bool = False) -> None:
        self.disabled = disabled
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


def test_a_communicator_that_sends_nothing_is_refused() -> None:
    """vLLM's returns from `send` as if the bytes were sent."""
    with pytest.raises(TransportFailed, match="disabled"):
        NcclTransport(FakeNccl(disabled=True), 1, FakeTensor(bytes(100)), FakeStream())


async def test_an_error_of_nccl_ends_the_flow(path: str) -> None:
    async with serving(path) as daemon, connected(path) as client:
        flow = client.submit(3, 100, "host", 1.0)
        with pytest.raises(TransportFailed, match="rank 1: NCCL error"):
            await paced(flow, NcclTransport(FakeNccl(), 1, FakeTensor(bytes(100)), FakeStream()), nothing)
        await until_on_loop(lambda: not daemon.status()["flows"])


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
