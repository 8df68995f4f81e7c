"""A clock that all gateways and workers of a fleet share: Redis' own TIME.

Hosts' clocks may differ by seconds, and one may be set forward or back. What is compared between hosts (the age of
published states, deadlines that engines are told) is therefore stamped on Redis' clock. Each process knows how far it
is ahead of its own monotonic clock, which nobody sets.
"""

from __future__ import annotations

import time
from collections.abc import Callable


class SharedClock:
    """Seconds since the epoch on Redis' clock. Until that was read it is the host's wall clock; while Redis is
    unavailable it goes on from the last reading, so that nothing jumps when Redis comes or goes."""

    def __init__(self, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._monotonic = monotonic
        self._offset: float | None = None

    @property
    def offset(self) -> float:
        """Seconds to add to the monotonic clock."""
        return time.time() - self._monotonic() if self._offset is None else self._offset

    def now(self) -> float:
        return self._monotonic() + self.offset

    def ahead_of_wall(self) -> float:
        """Seconds to add to this host's wall clock."""
        return self.now() - time.time()

    def heard(self, server_s: float, sent: float, received: float) -> None:
        """Redis' TIME, asked for and answered at these monotonic seconds. It was read half a round trip ago, with an
        error of half a round trip: a reading that does not contradict the last one changes nothing."""
        half = (received - sent) / 2
        offset = server_s + half - received
        if self._offset is None or abs(offset - self._offset) > half:
            self._offset = offset
