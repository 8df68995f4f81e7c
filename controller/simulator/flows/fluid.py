"""A network of ports as fluid flows, with exact events: strict ranks, max-min sharing within a rank, caps and floors.

A flow goes through a path of ports (its sender's, those of the fabric, its receiver's) and moves as fast as the slowest
lets it. Every port serves its ranks one after the other, each from what the ranks before it left. Within a rank it
offers all flows the same rate, the one that fills it when what they get elsewhere is taken into account. Ports are
divided again until their offers agree, which is max-min fairness (Charny's advertised rates). Rates are piecewise
constant: they change when a flow starts, ends or gets another turn, and only ports whose offers change are looked at.

A flow may stand for several single ones, as a collective's bytes of one port do: it is offered as much as all of them.

A switch has a few queues and sees no more of a flow than the class of its packets. In a network `by_class` only a
sender's own port serves by rank, as a transfer daemon orders it, and all others by class, max-min within each.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Iterable, Mapping, Sequence

from controller.core.errors import ConfigError
from controller.flow.policies import Turn

TOLERANCE = 1e-7  # of a port's bandwidth, up to which two offers are equal
MOST_ROUNDS = 200  # divisions of one port while the network settles

Rank = tuple[float, ...]


class FluidFlow:
    """`left`: bytes at `at`; `rate`: bytes/s since then; `singles`: how many single flows it stands for; `ranks`: its
    rank at each port of its path; `own`: the port of its sender; `number`: which start of the network it was."""

    __slots__ = ("at", "id", "left", "number", "own", "path", "ranks", "rate", "singles", "turn", "version")

    def __init__(
        self, flow_id: str, path: Sequence[str], size: float, turn: Turn, now: float, singles: int, own: str
    ) -> None:
        self.id = flow_id
        self.path = tuple(path)
        self.left = float(size)
        self.turn = turn
        self.at = now
        self.rate = 0.0
        self.singles = singles
        self.own = own
        self.ranks: tuple[Rank, ...] = ()
        self.number = 0
        self.version = 0

    def left_at(self, now: float) -> float:
        return max(0.0, self.left - self.rate * (now - self.at))


class _Port:
    """Flows of a port by rank, and the rate that it offers to each single one of a rank."""

    __slots__ = ("bandwidth", "name", "offers", "ranks")

    def __init__(self, name: str, bandwidth: float) -> None:
        self.name = name
        self.bandwidth = bandwidth
        self.ranks: dict[Rank, dict[str, FluidFlow]] = {}
        self.offers: dict[Rank, float] = {}


class FluidNetwork:
    """Flows by id. A driver calls `advance` at `next_end` or before anything else happens, and then `settle`."""

    def __init__(self, ports: Mapping[str, float], by_class: bool = False) -> None:
        """`ports`: bandwidth in bytes/s. `by_class`: ports that are not the sender's own serve by the class of packets.
        Raises ConfigError."""
        self._by_class = by_class
        self._ports: dict[str, _Port] = {}
        self._flows: dict[str, FluidFlow] = {}
        self._changed: dict[str, None] = {}  # ports to divide again
        self._ends: list[tuple[float, int, int, str]] = []  # time, number and version of the flow, its id
        self._started = 0
        self.moved_bytes = 0.0
        for port, bandwidth in ports.items():
            self.add_port(port, bandwidth)

    def __len__(self) -> int:
        return len(self._flows)

    def __contains__(self, flow_id: str) -> bool:
        return flow_id in self._flows

    def add_port(self, name: str, bandwidth: float) -> None:
        """A port that is there already keeps its bandwidth. Raises ConfigError."""
        if not bandwidth > 0:
            raise ConfigError(f"port {name!r}: bandwidth must be positive bytes/s", field="bandwidth")
        self._ports.setdefault(name, _Port(name, bandwidth))

    def bandwidth(self, port: str) -> float:
        """Bytes/s."""
        return self._ports[port].bandwidth

    def start(
        self,
        flow_id: str,
        path: Sequence[str],
        size: float,
        turn: Turn,
        now: float,
        singles: int = 1,
        own: str = "",
    ) -> None:
        """`own`: the sender's port, if it is on the path. Raises ConfigError for a size that is not positive, no single
        flow, an unknown port, or an id in use."""
        if not size > 0:
            raise ConfigError("size must be positive bytes", field="size")
        if singles < 1:
            raise ConfigError("singles must be at least 1", field="singles")
        if flow_id in self._flows:
            raise ConfigError(f"flow {flow_id!r} has started", field="id")
        if unknown := [port for port in path if port not in self._ports]:
            raise ConfigError(f"unknown port {unknown[0]!r}", field="path")
        flow = self._flows[flow_id] = FluidFlow(flow_id, path, size, turn, now, singles, own)
        self._started = flow.number = self._started + 1
        self._enter(flow)

    def turn(self, flow_id: str, turn: Turn) -> None:
        flow = self._flows.get(flow_id)
        if flow is not None and flow.turn != turn:
            self._leave(flow)
            flow.turn = turn
            self._enter(flow)

    def cancel(self, flow_id: str, now: float) -> None:
        flow = self._flows.get(flow_id)
        if flow is not None:
            self._remove(flow, now)

    def advance(self, now: float) -> list[str]:
        """The flows that have ended by `now`, in order of their end, and of their start if that is equal."""
        ended = []
        while self._ends and self._ends[0][0] <= now + 1e-12:
            _, number, version, flow_id = heapq.heappop(self._ends)
            if self._is_now(flow_id, number, version):
                self._remove(self._flows[flow_id], now)
                ended.append(flow_id)
        return ended

    def _is_now(self, flow_id: str, number: int, version: int) -> bool:
        """Whether the flow has the rate of this version. One that was cancelled may have left its id to another."""
        flow = self._flows.get(flow_id)
        return flow is not None and flow.number == number and flow.version == version

    def next_end(self) -> float:
        """When the next flow ends if nothing changes; infinite if none moves. Call `settle` before."""
        while self._ends:
            at, number, version, flow_id = self._ends[0]
            if self._is_now(flow_id, number, version):
                return at
            heapq.heappop(self._ends)
        return math.inf

    def left(self, flow_id: str, now: float) -> float:
        flow = self._flows.get(flow_id)
        return flow.left_at(now) if flow is not None else 0.0

    def rate(self, flow_id: str) -> float:
        """Bytes/s. Call `settle` before."""
        return self._flows[flow_id].rate

    def rates(self, flow_ids: Iterable[str]) -> dict[str, dict[float, float]]:
        """Bytes/s of these flows by port and band (`Turn.rank[0]`)."""
        found: dict[str, dict[float, float]] = {}
        for flow in map(self._flows.__getitem__, flow_ids):
            band = flow.turn.rank[0]
            for port in flow.path:
                of_port = found.setdefault(port, {})
                of_port[band] = of_port.get(band, 0.0) + flow.rate
        return found

    def settle(self, now: float) -> None:
        """Divide the ports again where something has changed, until all offers agree."""
        waiting, queued = deque(self._changed), set(self._changed)
        self._changed.clear()
        moved: dict[str, FluidFlow] = {}
        most = MOST_ROUNDS * max(1, len(self._ports))
        while waiting and most:
            most -= 1
            port = self._ports[waiting.popleft()]
            queued.discard(port.name)
            for flow in self._divide(port):
                moved[flow.id] = flow
                for name in flow.path:
                    if name is not port.name and name not in queued:
                        queued.add(name)
                        waiting.append(name)
        for flow in moved.values():
            self._set_rate(flow, now)

    # ---- sharing ----------------------------------------------------------------------------------------------------

    def _divide(self, port: _Port) -> list[FluidFlow]:
        """Compute the port's offers again. The flows whose offer here changed."""
        changed: list[FluidFlow] = []
        floors = self._floors(port)
        room = port.bandwidth - sum(floors.values())
        smallest = TOLERANCE * port.bandwidth
        for rank in sorted(port.ranks):
            flows = port.ranks[rank]
            room += floors.get(rank, 0.0)
            limits = [(self._elsewhere(flow, port.name), flow.singles) for flow in flows.values()]
            offer = _offer(limits, room)
            before = port.offers.get(rank)
            if before is None or abs(offer - before) > smallest:
                port.offers[rank] = offer
                changed += flows.values()
            room = max(0.0, room - sum(singles * min(limit, offer) for limit, singles in limits))
        return changed

    def _floors(self, port: _Port) -> dict[Rank, float]:
        """What ranks with a floor get before all others, at most what they can use."""
        found = {}
        for rank, flows in port.ranks.items():
            floor = max(flow.turn.floor for flow in flows.values())
            if floor:
                usable = sum(flow.singles * self._elsewhere(flow, port.name) for flow in flows.values())
                found[rank] = min(floor * port.bandwidth, usable)
        return found

    def _elsewhere(self, flow: FluidFlow, here: str) -> float:
        """The rate that its cap and the other ports of its path allow each of its single flows."""
        limit = math.inf if flow.turn.cap is None else flow.turn.cap / flow.singles
        for name, rank in zip(flow.path, flow.ranks, strict=True):
            if name != here:
                limit = min(limit, self._ports[name].offers.get(rank, self._ports[name].bandwidth))
        return limit

    def _set_rate(self, flow: FluidFlow, now: float) -> None:
        cap, offers = flow.turn.cap, zip(flow.path, flow.ranks, strict=True)
        rate = flow.singles * min(self._ports[name].offers[rank] for name, rank in offers)
        rate = rate if cap is None else min(rate, cap)
        if rate == flow.rate and flow.version:
            return
        left = flow.left_at(now)
        self.moved_bytes += flow.left - left
        flow.left, flow.at, flow.rate = left, now, rate
        flow.version += 1
        if rate > 0:
            heapq.heappush(self._ends, (now + left / rate, flow.number, flow.version, flow.id))

    # ---- flows ------------------------------------------------------------------------------------------------------

    def _enter(self, flow: FluidFlow) -> None:
        flow.ranks = self._ranks(flow)
        for name, rank in zip(flow.path, flow.ranks, strict=True):
            port = self._ports[name]
            port.ranks.setdefault(rank, {})[flow.id] = flow
            port.offers.pop(rank, None)  # so that the newcomer is told even an offer that stays
            self._changed[name] = None

    def _ranks(self, flow: FluidFlow) -> tuple[Rank, ...]:
        rank, packets = flow.turn.rank, (float(flow.turn.wire_class),)
        return tuple(packets if self._by_class and name != flow.own else rank for name in flow.path)

    def _leave(self, flow: FluidFlow) -> None:
        for name, rank in zip(flow.path, flow.ranks, strict=True):
            port = self._ports[name]
            flows = port.ranks[rank]
            del flows[flow.id]
            if not flows:
                del port.ranks[rank]
                port.offers.pop(rank, None)
            self._changed[name] = None

    def _remove(self, flow: FluidFlow, now: float) -> None:
        self.moved_bytes += flow.left - flow.left_at(now)
        del self._flows[flow.id]
        self._leave(flow)


def _offer(limits: Sequence[tuple[float, int]], room: float) -> float:
    """The rate that fills `room` if each single flow takes it or its own limit, whichever is smaller. `limits`: of
    single flows, and how many have each.

    If the limits leave room, one flow more could have its limit and all of that.
    """
    total = sum(limit * singles for limit, singles in limits)
    if total <= room:
        most, singles = max(limits)
        return most + (room - total) / singles
    left, count = room, sum(singles for _, singles in limits)
    for limit, singles in sorted(limits):
        if limit * count > left:
            return left / count
        left -= limit * singles
        count -= singles
    return max(limits)[0]  # they are too much by no more than rounding
