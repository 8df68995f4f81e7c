"""When a request reached the server's front end, on the scheduler's own clock. Knows nothing of vLLM.

vLLM gives the time on the machine's wall clock; the plug-in decides on a monotonic one. How far apart the two are is
measured rarely, not for each request: two readings are never taken at one instant, and the small differences would
exchange requests that arrived one right after the other.
"""

from __future__ import annotations

from collections.abc import Callable

MOST_IN_FRONT_S = 60.0  # a request whose front end says that it waited there longer has another clock
STEP_S = 0.001  # clocks that moved against one another by more have been set; less is how far apart two readings are


class Arrivals:
    """Turns times on the wall clock into times on `monotonic`. Seconds."""

    def __init__(self, monotonic: Callable[[], float], wall: Callable[[], float]) -> None:
        self._monotonic, self._wall = monotonic, wall
        self._apart: float | None = None  # monotonic less wall

    def at(self, wall_time: float) -> float:
        """Never later than now, and at most `MOST_IN_FRONT_S` earlier."""
        before = self._monotonic()
        wall = self._wall()
        now = self._monotonic()
        if self._apart is None or now - before <= STEP_S < abs(now - wall - self._apart):
            self._apart = now - wall
        return max(now - MOST_IN_FRONT_S, min(wall_time + self._apart, now))
