"""How tensors are put on their way to another engine: in pieces, few enough at a time that none waits long.

NCCL counts an operation's time from when it was queued, and its watchdog ends the group when one has taken too long. So
what is on its way is bounded in bytes, and the time that a group is given follows from that bound: a link that moves
is never cut off, however slow it is within `SLOWEST` and however large a tensor.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from datetime import timedelta
from typing import Any, Generic, NamedTuple, TypeVar

import torch

PIECE_BYTES = 64 << 20
IN_FLIGHT_BYTES = 256 << 20  # on their way at a time
IN_FLIGHT = 16  # pieces at a time: of small tensors
PATIENCE_S = 5.0  # for a peer that is alive and busy
SLOWEST = 10e6  # bytes a second of a link that still counts as moving
T = TypeVar("T")


def patience(nbytes: int) -> timedelta:
    """How long the next so many bytes may take before the peer counts as gone."""
    return timedelta(seconds=PATIENCE_S + nbytes / SLOWEST)


def longest_operation() -> timedelta:
    """Of one piece, from when it is queued behind all that may be on its way."""
    return patience(IN_FLIGHT_BYTES)


class _Piece(NamedTuple, Generic[T]):
    """Of a tensor on its way; its bytes are kept until it has passed. `ends`: the tensor that ends with it."""

    work: Any
    memory: torch.Tensor
    ends: T | None


def passed(verb: Callable[..., Any], peer: int, blocks: Iterable[tuple[T, torch.Tensor]]) -> Iterator[T]:
    """Queue all blocks, each contiguous; yields what each was given with once the whole of it has passed, in order.

    `verb` is the group's `send` or `recv`. Raises RuntimeError where the peer is silent for too long.
    """
    pending: deque[_Piece[T]] = deque()
    queued = tag = 0
    # No comprehension: its frame would keep the group, which must end in this thread (`torch_transfer._together`).
    for name, block in blocks:
        pieces = block.view(torch.uint8).view(-1).split(PIECE_BYTES)
        for number, piece in enumerate(pieces, 1):
            while pending and (queued + piece.nbytes > IN_FLIGHT_BYTES or len(pending) >= IN_FLIGHT):
                queued -= pending[0].memory.nbytes
                if (ended := _waited(pending.popleft())) is not None:
                    yield ended
            tag += 1
            pending.append(_Piece(verb([piece], peer, tag), piece, name if number == len(pieces) else None))
            queued += piece.nbytes
    while pending:
        if (ended := _waited(pending.popleft())) is not None:
            yield ended


def _waited(piece: _Piece[T]) -> T | None:
    cuda = piece.memory.device.type == "cuda"
    piece.work.wait(longest_operation() if cuda else patience(piece.memory.nbytes))
    return piece.ends
