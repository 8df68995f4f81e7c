"""When the hosts of a simulated network have to be called again."""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator


class Wakes:
    """Of each host counts what was said last. Times are in seconds; infinite: not by itself."""

    def __init__(self) -> None:
        self._at: dict[str, float] = {}
        self._heap: list[tuple[float, str]] = []

    def set(self, host: str, at: float) -> None:
        if self._at.get(host) == at:
            return
        self._at[host] = at
        if at < math.inf:
            heapq.heappush(self._heap, (at, host))

    def first(self) -> float:
        """When the next one is due; infinite if none is."""
        heap = self._heap
        while heap and self._at[heap[0][1]] != heap[0][0]:
            heapq.heappop(heap)
        return heap[0][0] if heap else math.inf

    def due(self, to: float) -> Iterator[str]:
        """Those that are due until then, the earliest first. What is said meanwhile counts too."""
        while self._heap and self._heap[0][0] <= to:
            at, host = heapq.heappop(self._heap)
            if self._at[host] == at:
                self._at[host] = math.inf
                yield host
