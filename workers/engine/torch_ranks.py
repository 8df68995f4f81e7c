"""Tensor-parallel ranks: their sums, and the counter by which they stop at the same place (FlowPrefill 5.1).

Ranks run the same operators and meet in the sums of o_proj and down_proj. A rank that stopped on its own would leave
the others waiting in a sum it never enters; a rank that waited at an operator for the others' consent would do the same
to one that is ahead and inside a sum already. So the wish to stop travels in the sums themselves, as one more element:
after sum number n every rank knows whether any rank wanted to stop when it entered sum n, and all of them do, there.
No message is added and no rank ever waits for anything but a sum. The price: with several ranks the boundaries are the
two sums of a layer, not its five operators.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
import torch.distributed as dist


class Ranks(Protocol):
    """`sums`: the synchronised counter. `stop`: what the last sum said. `wanted` is asked when a sum is entered."""

    rank: int
    world: int
    sums: int
    stop: bool
    wanted: Callable[[], bool]

    def sum(self, tensor: torch.Tensor) -> torch.Tensor:
        """Over all ranks."""
        ...


class Alone:
    rank = 0
    world = 1
    sums = 0
    stop = False

    def __init__(self) -> None:
        self.wanted: Callable[[], bool] = lambda: False

    def sum(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor


class ProcessRanks:
    """The ranks of the default process group, which must be initialised."""

    def __init__(self) -> None:
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        self.sums, self.stop = 0, False
        self.wanted: Callable[[], bool] = lambda: False

    def sum(self, tensor: torch.Tensor) -> torch.Tensor:
        message = torch.empty(tensor.numel() + 1, dtype=tensor.dtype, device=tensor.device)
        message[:-1] = tensor.flatten()
        message[-1] = float(self.wanted())
        dist.all_reduce(message)
        self.sums += 1
        self.stop = bool(message[-1] > 0)
        return message[:-1].view_as(tensor)
