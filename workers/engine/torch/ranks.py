"""The interface of tensor-parallel ranks: sums over all ranks, and stopping at the same boundary (`rank_counter`)."""

from __future__ import annotations

from typing import Protocol

import torch
import torch.distributed as dist

from workers.engine.torch.rank_counter import RankCounter


class Ranks(Protocol):
    rank: int
    world: int

    def stops(self, wanted: bool, over: bool) -> bool:
        """Call at each boundary; True if this rank must stop here, because it or another rank wants to."""
        ...

    def sum(self, tensor: torch.Tensor) -> torch.Tensor:
        """The sum over all ranks."""
        ...


class Alone:
    """A single rank."""

    rank = 0
    world = 1

    def stops(self, wanted: bool, over: bool) -> bool:
        return wanted

    def sum(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor


class ProcessRanks:
    """The ranks of the default process group, which must be initialised. `descriptor`: as in RankCounter."""

    def __init__(self, descriptor: int) -> None:
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        self.stops = RankCounter(descriptor, self.rank, self.world).stops

    def sum(self, tensor: torch.Tensor) -> torch.Tensor:
        dist.all_reduce(tensor)
        return tensor
