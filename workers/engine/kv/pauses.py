"""When KV came, and when it stood still in between, as the one who receives it sees it.

A source that is held, or whose prefill has not come so far, says nothing of its next layer. So the time between the end
of one layer and the word of the next is a pause. Within a layer KV counts as coming, however slow.
"""

from __future__ import annotations

import heapq
import itertools
import math
import time
from collections.abc import Callable
from typing import NamedTuple

from controller.core.kv_links import MOST_PAUSES

SHORTEST_PAUSE_S = 0.005  # less is between any two layers


class Came(NamedTuple):
    """`span_s`: from the first KV to the end. `pauses`: the longest ones, as in KvMoved."""

    span_s: float
    pauses: tuple[float, ...]


class KvArrivals:
    """Of one transfer. `clock`: seconds."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._first_at: float | None = None
        self._ended_at = math.inf  # the last layer
        self._bytes = 0
        self._pauses: list[tuple[float, float, float, int]] = []  # length, begin, end, bytes until then

    def layer(self) -> None:
        """The source has said that a layer comes now."""
        now = self._clock()
        if self._first_at is None:
            self._first_at = now
        self._paused(now)

    def layer_came(self, size: int) -> None:
        """With so many bytes."""
        self._ended_at = self._clock()
        self._bytes += size

    def over(self) -> Came:
        """The source has said that this was all."""
        now = self._clock()
        self._paused(now)
        longest = sorted(each[1:] for each in heapq.nlargest(MOST_PAUSES, self._pauses))
        told = ((now - begin, now - end, size / max(1, self._bytes)) for begin, end, size in longest)
        pauses = tuple(round(each, 6) for each in itertools.chain.from_iterable(told))
        return Came(0.0 if self._first_at is None else now - self._first_at, pauses)

    def _paused(self, now: float) -> None:
        if now - self._ended_at >= SHORTEST_PAUSE_S:
            self._pauses.append((now - self._ended_at, self._ended_at, now, self._bytes))
