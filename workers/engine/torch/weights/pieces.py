"""Sends tensors to another engine in pieces, with a limit on the bytes in flight.

NCCL counts an operation's time from when it was queued, and its watchdog aborts the group when one takes too long. So
the bytes in flight are limited, and the timeout of a group follows from that limit: a link that is faster than
`SLOWEST` is never cut off, however large a tensor is.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from datetime import timedelta
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

import torch

PIECE_BYTES = 64 << 20
IN_FLIGHT_BYTES = 256 << 20  # limit of bytes in flight
IN_FLIGHT = 16  # limit of pieces in flight, for small tensors
PATIENCE_S = 5.0  # for a peer that is alive and busy
SLOWEST = 10e6  # bytes/s of the slowest link that is not cut off
T = TypeVar("T")


class PiecePace(Protocol):
    """Turns of a transfer on a shared link. Both sides must have the same `piece_bytes`."""

    @property
    def piece_bytes(self) -> int: ...

    @property
    def in_flight_bytes(self) -> int: ...

    def next(self, number: int) -> None:
        """Return once the piece with this number, from 1, may move. Raises RuntimeError."""
        ...

    def moved(self, nbytes: int) -> None:
        """So many more bytes have moved."""
        ...


class Unpaced:
    """Without flow scheduling: nothing waits."""

    @property
    def piece_bytes(self) -> int:
        return PIECE_BYTES

    @property
    def in_flight_bytes(self) -> int:
        return IN_FLIGHT_BYTES

    def next(self, number: int) -> None:
        pass

    def moved(self, nbytes: int) -> None:
        pass


UNPACED = Unpaced()


def patience(nbytes: int) -> timedelta:
    """How long the next `nbytes` may take before the peer counts as gone."""
    return timedelta(seconds=PATIENCE_S + nbytes / SLOWEST)


def longest_operation() -> timedelta:
    """The timeout of one piece, which may be queued behind all bytes in flight."""
    return patience(IN_FLIGHT_BYTES)


class _Piece(NamedTuple, Generic[T]):
    """A piece in flight, whose bytes are kept until it has been sent or received. `ends`: the key of the tensor that
    ends with it."""

    work: Any
    memory: torch.Tensor
    ends: T | None


def passed(
    verb: Callable[..., Any], peer: int, blocks: Iterable[tuple[T, torch.Tensor]], pace: PiecePace = UNPACED
) -> Iterator[T]:
    """Queue all blocks, each contiguous. Yields the key of each block, in order, once it was completely sent or
    received.

    `verb`: the group's `send` or `recv`. `pace`: whether the next piece may move.

    Raises RuntimeError if the peer is silent for too long.
    """
    pending: deque[_Piece[T]] = deque()
    queued = tag = 0
    # Not a comprehension, whose frame would keep the group, which must end in this thread (`transfer._together`).
    for name, block in blocks:
        pieces = block.view(torch.uint8).view(-1).split(pace.piece_bytes)
        for number, piece in enumerate(pieces, 1):
            while pending and (queued + piece.nbytes > pace.in_flight_bytes or len(pending) >= IN_FLIGHT):
                queued -= pending[0].memory.nbytes
                if (ended := _waited(pending.popleft(), pace)) is not None:
                    yield ended
            tag += 1
            pace.next(tag)
            pending.append(_Piece(verb([piece], peer, tag), piece, name if number == len(pieces) else None))
            queued += piece.nbytes
    while pending:
        if (ended := _waited(pending.popleft(), pace)) is not None:
            yield ended


def _waited(piece: _Piece[T], pace: PiecePace = UNPACED) -> T | None:
    cuda = piece.memory.device.type == "cuda"
    piece.work.wait(longest_operation() if cuda else patience(piece.memory.nbytes))
    pace.moved(piece.memory.nbytes)
    return piece.ends
