"""The open connections of one server: how many there are, in all and by address, and what unfinished heads hold.

Where everything is taken, room is made at the cost of whoever holds most: of the connections that only wait for a next
request, those of the address that keeps most of them; of unfinished heads, the largest of the address that holds most.
A stranger that keeps to every limit can so take places from itself alone.
"""

from __future__ import annotations

import asyncio
import ipaddress
from collections import Counter
from typing import Protocol

from workers.http.limits import HttpLimits

SWEEP_S = 1.0
ADDRESS_SHARE = 1 / 8  # of `heads_bytes`, for the unfinished heads of one address


class Connection(Protocol):
    """What the book needs of a connection."""

    loop: asyncio.AbstractEventLoop

    def late(self, now: float) -> None:
        """What it reads did not come in time."""

    def close_idle(self) -> None:
        """Another connection needs its place."""

    def refuse_head(self) -> None:
        """Unfinished heads hold too much."""


class Heads:
    """The unfinished heads of one address."""

    def __init__(self) -> None:
        self.bytes = 0
        self.sizes: dict[Connection, int] = {}

    def set(self, connection: Connection, size: int) -> int:
        """Returns the bytes by which it grew."""
        more = size - self.sizes.pop(connection, 0)
        if size:
            self.sizes[connection] = size
        self.bytes += more
        return more

    def largest(self) -> Connection:
        return max(self.sizes, key=self.sizes.__getitem__)


class ConnectionBook:
    """`closed`: how many connections were closed for which reason."""

    def __init__(self, limits: HttpLimits) -> None:
        self.limits = limits
        self.open = 0
        self.by_address: Counter[str] = Counter()
        self.closed: Counter[str] = Counter()
        self.idle: dict[str, dict[Connection, None]] = {}  # by address, the longest idle first
        self.heads_bytes = 0  # read of heads that are not complete
        self.heads: dict[str, Heads] = {}  # the same by address
        self.reading: dict[Connection, float] = {}  # when what each is still reading must have come, loop time
        self._sweep: asyncio.TimerHandle | None = None

    def opened(self, address: str) -> str:
        """Count a connection. Returns why it must be closed; "" if it may stay."""
        self.open += 1
        self.by_address[address] += 1
        if self.by_address[address] > self.limits.connections_per_address and not self._end_idle(address):
            return "too_many_from_address"
        if self.open > self.limits.connections and not self._end_idle(max(self.idle, key=self._idle_of, default="")):
            return "too_many_connections"
        return ""

    def gone(self, address: str) -> None:
        self.open -= 1
        self.by_address[address] -= 1
        if not self.by_address[address]:
            del self.by_address[address]

    # ---- connections without a request ------------------------------------------------------------------------------

    def rests(self, connection: Connection, address: str) -> None:
        """It waits for a next request."""
        self.idle.setdefault(address, {})[connection] = None

    def works(self, connection: Connection, address: str) -> None:
        """It no longer waits."""
        resting = self.idle.get(address)
        if resting is not None and resting.pop(connection, self) is None and not resting:
            del self.idle[address]

    def _idle_of(self, address: str) -> int:
        return len(self.idle[address])

    def _end_idle(self, address: str) -> bool:
        """Close the connection of this address that has waited longest. False: none waits."""
        resting = self.idle.get(address)
        if not resting:
            return False
        longest = next(iter(resting))
        self.works(longest, address)
        self.closed["made_room"] += 1
        longest.close_idle()
        return True

    # ---- unfinished heads -------------------------------------------------------------------------------------------

    def holds(self, connection: Connection, address: str, size: int) -> None:
        """`size` bytes of its head have been read. It, or one that holds more, is refused if that is too much."""
        of_address = self.heads.setdefault(address, Heads())
        self.heads_bytes += of_address.set(connection, size)
        if of_address.bytes > self.limits.heads_bytes * ADDRESS_SHARE:
            of_address.largest().refuse_head()
        elif self.heads_bytes > self.limits.heads_bytes:
            max(self.heads.values(), key=lambda heads: heads.bytes).largest().refuse_head()

    def released(self, connection: Connection, address: str) -> None:
        """Its head is complete, or is not read further."""
        of_address = self.heads.get(address)
        if of_address is not None:
            self.heads_bytes += of_address.set(connection, 0)
            if not of_address.sizes:
                del self.heads[address]

    # ---- time -------------------------------------------------------------------------------------------------------

    def expect(self, connection: Connection, due: float) -> None:
        """It must have read what it reads until `due`."""
        self.reading[connection] = due
        if self._sweep is None:
            limits = self.limits
            period_s = min(SWEEP_S, limits.head_s / 4, limits.body_s / 4)
            self._sweep = connection.loop.call_later(period_s, self._look, connection.loop)

    def _look(self, loop: asyncio.AbstractEventLoop) -> None:
        self._sweep = None
        now = loop.time()
        for connection in [connection for connection, due in self.reading.items() if due <= now]:
            connection.late(now)
        if self.reading and self._sweep is None:
            connection = next(iter(self.reading))
            self.expect(connection, self.reading[connection])


def address_of(client: tuple[str, int] | None) -> str:
    """Whom a connection is counted for: an IPv4 address, or the /64 of an IPv6 address, of which each host has 2^64."""
    host = client[0] if client else ""
    if ":" not in host:
        return host
    try:
        address = ipaddress.IPv6Address(host.partition("%")[0])
    except ValueError:
        return host
    mapped = address.ipv4_mapped
    return str(mapped) if mapped else address.exploded[:19]
