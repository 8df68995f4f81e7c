"""Tensor-parallel ranks: their sums, and the counter by which they agree where to stop (FlowPrefill 5.1).

Ranks run the same operators and meet in the sums after o_proj and down_proj. A rank that stopped on its own would leave
the others waiting in a sum it never enters. So each rank counts the operators it has done, and on a signal all ranks
exchange their counts and stop together at the largest: who is behind can get there, since nobody has to be ahead of it.
The exchange happens once a signal, never at a check, on a group of its own so that it cannot meet a layer's sum.
"""

from __future__ import annotations

from typing import Protocol

import torch
import torch.distributed as dist


class Ranks(Protocol):
    rank: int
    world: int

    def sum(self, tensor: torch.Tensor) -> torch.Tensor:
        """In place, over all ranks."""
        ...

    def agree(self, done: int) -> int:
        """The largest count of operators done on any rank. Every rank must call it once a signal."""
        ...


class Alone:
    rank = 0
    world = 1

    def sum(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor

    def agree(self, done: int) -> int:
        return done


class ProcessRanks:
    """The ranks of the default process group, which must be initialised."""

    def __init__(self) -> None:
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        self._counters = dist.new_group(backend="gloo")

    def sum(self, tensor: torch.Tensor) -> torch.Tensor:
        dist.all_reduce(tensor)
        return tensor

    def agree(self, done: int) -> int:
        counter = torch.tensor(done)
        dist.all_reduce(counter, op=dist.ReduceOp.MAX, group=self._counters)
        return int(counter)
