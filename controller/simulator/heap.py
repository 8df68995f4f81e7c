"""The queue of happenings in virtual time.

Those at equal times are ordered by kind, then in the order of scheduling.
"""

from __future__ import annotations

import heapq
import math
from enum import IntEnum
from typing import Any


class EventKind(IntEnum):
    """The order of happenings at one instant: results first, then reports, then reactions."""

    STEP = 0  # a step (or a leap of steps) ended
    FAILURE = 1
    DELIVERY = 2  # something reached an engine, or an answer came back from one
    ARRIVAL = 3
    TICK = 4  # telemetry, progress, samples
    WAKE = 5
    END = 6


# Time, kind, serial, subject, and a version that tells a stale entry from a valid one. A plain tuple, since a run makes
# hundreds of thousands.
Happening = tuple[float, EventKind, int, Any, int]


class EventHeap:
    """Time never goes back: scheduling before the last popped time is an error."""

    def __init__(self) -> None:
        self._heap: list[Happening] = []
        self._serial = 0
        self.now = 0.0

    def __len__(self) -> int:
        return len(self._heap)

    def push(self, at: float, kind: EventKind, subject: Any = None, version: int = 0) -> None:
        if at < self.now:
            raise ValueError(f"cannot schedule {kind.name} at {at}: it is {self.now} already")
        self._serial += 1
        heapq.heappush(self._heap, (at, kind, self._serial, subject, version))

    def pop(self) -> Happening:
        happening = heapq.heappop(self._heap)
        self.now = happening[0]
        return happening

    @property
    def next_at(self) -> float:
        """Time of the next happening; infinite if there is none."""
        return self._heap[0][0] if self._heap else math.inf
