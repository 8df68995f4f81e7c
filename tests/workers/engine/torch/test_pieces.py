"""What is on its way to another engine: how much of it at a time, how long it may take, and who cuts it off."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.workers.engine.torch.meetings import memory, met
from workers.engine.torch.weights import pieces as torch_pieces
from workers.engine.torch.weights.files import WeightsError
from workers.engine.torch.weights.meeting import LANDED, RECEIVER
from workers.engine.torch.weights.pieces import PATIENCE_S, SLOWEST, longest_operation, passed, patience

pytestmark = pytest.mark.torch


class Wire:
    """Stands for a group: what was queued and has not passed, and the most of it at any time."""

    def __init__(self) -> None:
        self.queued: list[int] = []
        self.waits: list[tuple[int, timedelta]] = []
        self.most_bytes = self.most_pieces = 0
        self.tags: list[int] = []

    def send(self, pieces: list[torch.Tensor], peer: int, tag: int) -> Any:
        (piece,) = pieces
        self.queued.append(piece.nbytes)
        self.tags.append(tag)
        self.most_bytes = max(self.most_bytes, sum(self.queued))
        self.most_pieces = max(self.most_pieces, len(self.queued))

        def wait(timeout: timedelta) -> None:
            assert self.queued.pop(0) == piece.nbytes, "another one is the oldest"
            self.waits.append((piece.nbytes, timeout))

        return SimpleNamespace(wait=wait)


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_pieces, "PIECE_BYTES", 100)
    monkeypatch.setattr(torch_pieces, "IN_FLIGHT_BYTES", 350)


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("sizes", [[1000, 1000], [10] * 60, [90, 1, 333, 0, 700, 100], [350], [1]])
def test_what_is_on_its_way_is_bounded_and_every_tensor_is_told_once_in_order(sizes):
    wire = Wire()
    given = [(name, torch.zeros(size, dtype=torch.uint8)) for name, size in enumerate(sizes, 1)]
    told: list[tuple[int, int]] = []
    for name in passed(wire.send, RECEIVER, given):
        told.append((name, sum(nbytes for nbytes, _ in wire.waits)))
    assert [name for name, _ in told] == list(range(1, len(sizes) + 1))
    assert [so_far for _, so_far in told] == [sum(sizes[:name]) for name, _ in told], "told when its last byte passed"
    assert wire.queued == []
    assert wire.tags == sorted(set(wire.tags))
    assert wire.most_bytes <= 350
    assert wire.most_pieces <= torch_pieces.IN_FLIGHT
    assert wire.most_bytes > min(sum(sizes), 350) - 100 or wire.most_pieces == torch_pieces.IN_FLIGHT, "it is used"


def test_a_group_is_given_what_the_slowest_link_takes_for_all_that_may_be_queued():
    slowest = PATIENCE_S + torch_pieces.IN_FLIGHT_BYTES / SLOWEST
    assert longest_operation().total_seconds() == pytest.approx(slowest, abs=1e-3)
    assert torch_pieces.PIECE_BYTES < torch_pieces.IN_FLIGHT_BYTES


@pytest.mark.parametrize(("device", "expected"), [("cuda", longest_operation()), ("cpu", patience(7))])
def test_nccl_counts_from_when_a_piece_was_queued(device, expected):
    """So its wait covers what was queued before it; gloo's counts from the wait."""
    waits: list[timedelta] = []
    work = SimpleNamespace(wait=waits.append)
    piece: Any = torch_pieces._Piece(work, SimpleNamespace(device=torch.device(device), nbytes=7), "name")  # type: ignore[arg-type]
    assert torch_pieces._waited(piece) == "name"
    assert waits == [expected]


# ---- cut off --------------------------------------------------------------------------------------------------------


class Stuck:
    """A group whose operations end only when it is cut off, as NCCL's do once a peer is dead."""

    def __init__(self) -> None:
        self.entered, self.aborted = threading.Event(), threading.Event()

    def abort(self) -> None:
        self.aborted.set()

    def recv(self, *args: object) -> Any:
        def wait(timeout: timedelta) -> None:
            self.entered.set()
            assert self.aborted.wait(20), "nobody cut it off"
            raise RuntimeError("NCCL communicator was aborted")

        return SimpleNamespace(wait=wait)

    send = recv


@pytest.mark.parametrize("side", ["receiver", "source"])
async def test_a_peer_that_hangs_up_ends_the_transfer_at_once(monkeypatch, side):
    here, group = memory(), Stuck()
    theirs = here.manifest()
    async with met() as ends:
        mine, other = (ends[1], ends[0]) if side == "receiver" else ends
        monkeypatch.setattr(mine, "group", lambda rank, device: group)
        move = (lambda: here.receive(mine, theirs)) if side == "receiver" else (lambda: here.send(mine))
        moving = asyncio.create_task(asyncio.to_thread(move))
        assert await asyncio.to_thread(group.entered.wait, 20)
        assert not group.aborted.is_set()
        await other.close()
        with pytest.raises(WeightsError, match="failed: the other engine disconnected"):
            await moving


async def test_a_transfer_that_no_one_waits_for_any_more_is_cut_off_too(monkeypatch):
    """Its task was cancelled, so its own end was closed; a thread must not go on to write."""
    here, group = memory(), Stuck()
    theirs = here.manifest()
    async with met() as (_, mine):
        monkeypatch.setattr(mine, "group", lambda rank, device: group)
        moving = asyncio.create_task(asyncio.to_thread(here.receive, mine, theirs))
        assert await asyncio.to_thread(group.entered.wait, 20)
        await mine.close()
        with pytest.raises(WeightsError, match="disconnected"):
            await moving


async def test_a_peer_that_hangs_up_when_all_has_landed_cuts_nothing(monkeypatch):
    group, checked = Stuck(), threading.Event()
    async with met() as (source, receiver):
        asked, check = [], source.check

        def seen(keys: Any) -> bool:
            asked.append(list(keys))
            if source._alone:
                checked.set()
            return check(keys)

        monkeypatch.setattr(source, "check", seen)
        with source.cutting(group):
            receiver.landed()
            await asyncio.to_thread(source.wait, [LANDED])
            await receiver.close()
            assert await asyncio.to_thread(checked.wait, 20)  # it noticed
    assert not group.aborted.is_set()


def _stop() -> Iterator[tuple[str, torch.Tensor]]:
    yield "a", torch.zeros(8)
    raise RuntimeError("no memory for the next one")


def test_what_the_blocks_raise_is_what_the_caller_sees():
    with pytest.raises(RuntimeError, match="no memory for the next one"):
        list(passed(Wire().send, RECEIVER, _stop()))
