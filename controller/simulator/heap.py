"""Events in virtual time. Equal times are ordered by kind, then by the serial in which they were scheduled."""

from __future__ import annotations

import heapq
import math
from enum import IntEnum
from typing import Any

SHORTEST_WAKE_S = 0.0005  # as the gateway's own loop: a wake-up in the past must not spin


class EventKind(IntEnum):
    """What happens first at one instant: results before news, news before what is done about them."""

    STEP = 0  # a step (or a leap of steps) ended
    FAILURE = 1
    DELIVERY = 2  # something reached an engine or came back from one
    ARRIVAL = 3
    TICK = 4  # telemetry, progress, samples
    WAKE = 5
    END = 6


# When, kind, serial, what the kind needs, and a version that tells a stale entry from a valid one. A plain tuple: a run
# makes hundreds of thousands.
Happening = tuple[float, EventKind, int, Any, int]


class EventHeap:
    """Never goes back: scheduling before the last popped time is an error, not a silent reordering."""

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
        """Infinite when nothing is scheduled."""
        return self._heap[0][0] if self._heap else math.inf
