"""Progress of a prompt's KV at both ends of a transfer: what is written where it is computed, and what has come to
its receiver.

A transfer that overlaps with its prefill asks `KvProgress` before it reads. The entries of a token in a layer exist
once the step that computes the token has passed the layer. A sequence that was evicted is computed again, with equal
entries.

A source that is held, or whose prefill has not come so far, says nothing of its next layer. So the time between the end
of one layer and the word of the next is a pause to `KvArrivals`. Within a layer KV counts as coming, however slow.
"""

from __future__ import annotations

import heapq
import itertools
import math
import time
from collections.abc import Callable, Iterator
from typing import NamedTuple

from controller.core.kv_links import MOST_PAUSES
from controller.core.steps import Seq, SeqState, Step

SHORTEST_PAUSE_S = 0.005  # less is between any two layers


class KvProgress:
    """`layers_done(step_id)`: the number of layers that a running step has passed; 0 for a step that has ended."""

    def __init__(self, layers_done: Callable[[int], int] = lambda step_id: 0) -> None:
        self._layers_done = layers_done
        self._computing: dict[str, tuple[int, int]] = {}  # by sequence: id of its newest step, its tokens after that

    def began(self, step: Step) -> Iterator[Seq]:
        """Call when a step begins. Yields the sequences whose prefill ends with it, among those whose KV is kept for
        another engine."""
        for seq, start, length, last in step.chunks:
            if seq.keep_kv:
                self._computing[seq.id] = (step.id, start + length)
                if last:
                    yield seq

    def forget(self, seq: Seq) -> None:
        self._computing.pop(seq.id, None)

    def coming(self, seq: Seq) -> int:
        """Number of tokens whose entries exist, or will exist after its newest step."""
        return max(seq.computed, self._computing.get(seq.id, (0, 0))[1])

    def running(self, seq: Seq) -> int | None:
        """The step that computes entries of it now; None if there is none."""
        step_id, end = self._computing.get(seq.id, (0, 0))
        return step_id if seq.state is SeqState.RUNNING and seq.computed < end else None

    def layers_done(self, step_id: int) -> int:
        return self._layers_done(step_id)

    def is_written(self, seq: Seq, layer: int, stop: int) -> bool:
        """Whether the entries of all tokens below `stop` in this layer are written."""
        if seq.computed >= stop:
            return seq.coming is None or seq.coming.layers > layer
        step_id, end = self._computing.get(seq.id, (0, 0))
        return seq.state is SeqState.RUNNING and end >= stop and self._layers_done(step_id) > layer


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
