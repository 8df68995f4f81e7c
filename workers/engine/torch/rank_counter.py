"""The counter with which tensor-parallel ranks stop at the same boundary (FlowPrefill 5.1).

Ranks run the same operators and synchronise in the sums of o_proj and down_proj. A rank that stopped on its own would
leave the others waiting in a sum that it never enters. Waiting for the consent of the others would do the same to a
rank that is ahead and already in a sum. So no rank waits, and no rank stops before the furthest one: in shared memory
each rank stores at every boundary that it has reached it, and a rank that wants to stop makes the next boundary of the
furthest rank the stop of all. No rank is beyond it, and every rank reaches it, since the fast ones join the sums of the
slow ones on the way.

Two requests to stop are not fulfilled at once. While a rank has not reached the last stop yet, no other one is set, so
that none is missed; the request stays. And if a rank has already ended the step, all ranks end it.
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
from collections.abc import Iterator

WORD = 8  # bytes


def room(world: int) -> int:
    """Size in bytes of the memory that `world` ranks share. It is zero at first."""
    return WORD * (2 * world + 1)


def shared_memory(world: int) -> int:
    """A file descriptor of new shared memory, to pass to child processes."""
    descriptor = os.memfd_create("slackline-ranks")
    os.ftruncate(descriptor, room(world))
    return descriptor


class RankCounter:
    """The counter as one rank uses it, from one thread. Its lock is a file lock, which the kernel releases when the
    process ends."""

    def __init__(self, descriptor: int, rank: int, world: int) -> None:
        """`descriptor`: from `shared_memory`, or of a file of that size. It stays open."""
        self._descriptor, self._rank, self._world = descriptor, rank, world
        words = memoryview(mmap.mmap(descriptor, room(world))).cast("q")
        self._reached = words[:world]  # the last boundary that each rank has reached
        self._ended = words[world : 2 * world]  # the number of steps that each rank has ended
        self._place = words[2 * world :]  # the boundary at which all ranks stop
        self.here = 0

    def stops(self, wanted: bool, over: bool) -> bool:
        """Call at each boundary; True if this rank must stop here. `wanted`: whether it wants to stop; `over`: whether
        its step ends here."""
        self.here += 1
        with self._locked():
            if wanted and self.here > self._place[0]:
                self._request_stop()
            self._reached[self._rank] = self.here
            self._ended[self._rank] += over
            return self.here == self._place[0]

    def _request_stop(self) -> None:
        others = [rank for rank in range(self._world) if rank != self._rank]
        reached = [self._reached[rank] for rank in others]
        if min(reached) >= self._place[0] and all(self._ended[rank] <= self._ended[self._rank] for rank in others):
            self._place[0] = max(self.here, 1 + max(reached))

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        fcntl.lockf(self._descriptor, fcntl.LOCK_EX)
        try:
            yield
        finally:
            fcntl.lockf(self._descriptor, fcntl.LOCK_UN)
