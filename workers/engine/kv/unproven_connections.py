"""Connections to the KV listener whose other side has not proved yet that it is of the fleet: how many there may be,
and how often the log names one. The listener is on the network of engines, where anybody may connect."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable

from workers.http.protocol import address_of

MOST = 256  # in all
MOST_FROM_ADDRESS = 64  # a whole fleet that connects at once from one host greets within milliseconds
LOGGED_S = 1.0  # at most one warning in this time
log = logging.getLogger(__name__)


class UnprovenConnections:
    """Beyond a bound the oldest connection of the address that has most is closed, not the newcomer: engines greet at
    once, so whoever has waited longest is the least likely to be one. `clock`: monotonic seconds."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._waiting: dict[asyncio.StreamWriter, str] = {}  # the oldest first
        self._by_address: Counter[str] = Counter()
        self._logged_at = float("-inf")
        self._left_out = 0

    def __len__(self) -> int:
        return len(self._waiting)

    def come(self, writer: asyncio.StreamWriter) -> None:
        address = address_of(writer.get_extra_info("peername"))
        self._waiting[writer] = address
        self._by_address[address] += 1
        if self._by_address[address] > MOST_FROM_ADDRESS:
            self._close_oldest(address)
        elif len(self._waiting) > MOST:
            self._close_oldest(self._by_address.most_common(1)[0][0])

    def go(self, writer: asyncio.StreamWriter) -> None:
        """It has proved who it is, or is gone. May be called again."""
        address = self._waiting.pop(writer, None)
        if address is not None:
            self._by_address[address] -= 1
            if not self._by_address[address]:
                del self._by_address[address]

    def _close_oldest(self, address: str) -> None:
        oldest = next(writer for writer, host in self._waiting.items() if host == address)
        self.go(oldest)
        oldest.transport.abort()

    def failed(self, error: Exception) -> None:
        """Log it, unless one was logged just now: whoever connects in vain must not fill a disk."""
        now = self._clock()
        if now - self._logged_at < LOGGED_S:
            self._left_out += 1
            return
        others = f" ({self._left_out} more since the last such message)" if self._left_out else ""
        log.warning("a connection to the KV listener was no engine's: %s%s", error or type(error).__name__, others)
        self._logged_at, self._left_out = now, 0
