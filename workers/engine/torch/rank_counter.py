"""The counter by which tensor-parallel ranks stop at the same boundary (FlowPrefill 5.1).

Ranks run the same operators and meet in the sums of o_proj and down_proj. One that stopped on its own would leave the
others waiting in a sum that it never enters; one that waited for the others' consent would do the same to a rank that
is ahead, inside a sum already. So nobody waits, and nobody stops before the furthest: in memory that all share each
rank says at every boundary that it is there, and one that wants to stop makes the boundary that the furthest runs to
the place for all. No rank has gone beyond it and every rank comes there, the slow ones because the fast ones join their
sums on the way.

Two wishes are not answered at once. While a rank still runs to the last place no other is made, so that there is only
ever one and none is missed; the wish stays. And where a rank has ended the step already, all end it.
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
from collections.abc import Iterator

WORD = 8  # bytes


def room(world: int) -> int:
    """Bytes that `world` ranks share; zeros at first."""
    return WORD * (2 * world + 1)


def shared_memory(world: int) -> int:
    """A descriptor of it: for `pass_fds`."""
    descriptor = os.memfd_create("slackline-ranks")
    os.ftruncate(descriptor, room(world))
    return descriptor


class RankCounter:
    """One rank's view. For one thread of each process: the lock is the kernel's, and goes with its process."""

    def __init__(self, descriptor: int, rank: int, world: int) -> None:
        """`descriptor`: of `shared_memory`, or of a file of that size; it stays open."""
        self._descriptor, self._rank, self._world = descriptor, rank, world
        words = memoryview(mmap.mmap(descriptor, room(world))).cast("q")
        self._reached = words[:world]  # the boundary where each rank was last
        self._ended = words[world : 2 * world]  # how many steps each has ended
        self._place = words[2 * world :]  # the boundary where all stop
        self.here = 0

    def stops(self, wanted: bool, over: bool) -> bool:
        """At the next boundary: whether this rank stops here. `over`: its step ends here."""
        self.here += 1
        with self._alone():
            if wanted and self.here > self._place[0]:
                self._wish()
            self._reached[self._rank] = self.here
            self._ended[self._rank] += over
            return self.here == self._place[0]

    def _wish(self) -> None:
        others = [rank for rank in range(self._world) if rank != self._rank]
        reached = [self._reached[rank] for rank in others]
        if min(reached) >= self._place[0] and all(self._ended[rank] <= self._ended[self._rank] for rank in others):
            self._place[0] = max(self.here, 1 + max(reached))

    @contextlib.contextmanager
    def _alone(self) -> Iterator[None]:
        fcntl.lockf(self._descriptor, fcntl.LOCK_EX)
        try:
            yield
        finally:
            fcntl.lockf(self._descriptor, fcntl.LOCK_UN)
