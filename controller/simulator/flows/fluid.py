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
from operator import attrgetter

from controller.core.errors import ConfigError
from controller.flow.policies import Turn

TOLERANCE = 1e-7  # of a port's bandwidth, up to which two offers are equal
WAITING = Turn((math.inf,))  # of a flow that has no turn yet
MOST_ROUNDS = 200  # divisions of one port while the network settles

Rank = tuple[float, ...]


class _Queue:
    """Flows of one rank at a port. `offer`: the rate that each single one can have, bytes/s. Until it is `told` to all
    of them they count on the whole port."""

    __slots__ = ("flows", "offer", "port", "rank", "told")

    def __init__(self, port: _Port, rank: Rank) -> None:
        self.port = port
        self.rank = rank
        self.flows: dict[str, FluidFlow] = {}
        self.offer = port.bandwidth
        self.told = False


class _Port:
    """`queues`: by rank, and `in_order` the same, first to last, or None after a change. `floored`: how many of its
    flows have a floor. `stale`: dividing it may give other offers than it did. `waits`: for that in `settle`."""

    __slots__ = ("bandwidth", "floored", "in_order", "name", "queues", "stale", "waits")

    def __init__(self, name: str, bandwidth: float) -> None:
        self.name = name
        self.bandwidth = bandwidth
        self.queues: dict[Rank, _Queue] = {}
        self.in_order: list[_Queue] | None = None
        self.floored = 0
        self.stale = False
        self.waits = False


class FluidFlow:
    """`left`: bytes at `at`; `rate`: bytes/s since then; `singles`: how many single flows it stands for; `queues`: its
    place at each port of its path; `own`: the port of its sender; `number`: which start of the network it was."""

    __slots__ = ("at", "id", "left", "number", "own", "path", "queues", "rate", "singles", "turn", "version")

    def __init__(
        self, flow_id: str, path: Sequence[_Port], size: float, turn: Turn, now: float, singles: int, own: str
    ) -> None:
        self.id = flow_id
        self.path = path
        self.left = float(size)
        self.turn = turn
        self.at = now
        self.rate = 0.0
        self.singles = singles
        self.own = own
        self.queues: Sequence[_Queue] = ()
        self.number = 0
        self.version = 0

    def left_at(self, now: float) -> float:
        return max(0.0, self.left - self.rate * (now - self.at))

    def limit(self, here: _Queue) -> float:
        """The rate that its cap and the other ports of its path allow each of its single flows."""
        cap = self.turn.cap
        limit = math.inf if cap is None else cap / self.singles
        if len(self.queues) > 1:
            for queue in self.queues:
                if queue is not here and queue.offer < limit:
                    limit = queue.offer
        return limit


class FluidNetwork:
    """Flows by id. A driver calls `advance` at `next_end` or before anything else happens, and then `settle`."""

    def __init__(self, ports: Mapping[str, float], by_class: bool = False) -> None:
        """`ports`: bandwidth in bytes/s. `by_class`: ports that are not the sender's own serve by the class of packets.
        Raises ConfigError."""
        self._by_class = by_class
        self._ports: dict[str, _Port] = {}
        self._flows: dict[str, FluidFlow] = {}
        self._changed: dict[_Port, None] = {}  # ports to divide again
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
        turn: Turn | None,
        now: float,
        singles: int = 1,
        own: str = "",
    ) -> None:
        """`turn`: None if it has none yet, and does not move before it has. `own`: the sender's port, if it is on the
        path. Raises ConfigError for a size that is not positive, no single
        flow, an unknown port, or an id in use."""
        if not size > 0:
            raise ConfigError("size must be positive bytes", field="size")
        if singles < 1:
            raise ConfigError("singles must be at least 1", field="singles")
        if flow_id in self._flows:
            raise ConfigError(f"flow {flow_id!r} has started", field="id")
        try:
            ports = [self._ports[port] for port in path]
        except KeyError as error:
            raise ConfigError(f"unknown port {error.args[0]!r}", field="path") from None
        flow = self._flows[flow_id] = FluidFlow(flow_id, ports, size, turn or WAITING, now, singles, own)
        self._started = flow.number = self._started + 1
        if turn is None:
            self._changed |= dict.fromkeys(ports)  # they are divided in the order in which flows came
        else:
            self._enter(flow)

    def turn(self, flow_id: str, turn: Turn) -> None:
        flow = self._flows.get(flow_id)
        if flow is not None and (flow.turn != turn or not flow.queues):
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
        ends = self._ends
        while ends:
            at, number, version, flow_id = ends[0]
            if self._is_now(flow_id, number, version):
                return at
            heapq.heappop(ends)
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
                of_port = found.setdefault(port.name, {})
                of_port[band] = of_port.get(band, 0.0) + flow.rate
        return found

    def settle(self, now: float) -> None:
        """Divide the ports again where something has changed, until all offers agree."""
        waiting = deque(self._changed)
        self._changed.clear()
        for port in waiting:
            port.waits = True  # and `stale`, as all that have changed
            for queue in port.queues.values():
                if not queue.told:
                    _mark_others(queue)  # they were divided by another offer
        moved: dict[str, FluidFlow] = {}
        most = MOST_ROUNDS * max(1, len(self._ports))
        while waiting and most:
            most -= 1
            port = waiting.popleft()
            port.waits = False
            if not port.stale or not port.queues:
                continue
            for flow in _divide(port):
                moved[flow.id] = flow
                for other in flow.path:
                    if not other.waits:
                        other.waits = True
                        waiting.append(other)
        for port in waiting:
            port.waits = False
        for flow in moved.values():
            self._set_rate(flow, now)

    def _set_rate(self, flow: FluidFlow, now: float) -> None:
        cap = flow.turn.cap
        queues = flow.queues
        rate = flow.singles * (queues[0].offer if len(queues) == 1 else min([queue.offer for queue in queues]))
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
        rank, floored = flow.turn.rank, flow.turn.floor > 0
        packets = (float(flow.turn.wire_class),)
        queues = []
        for port in flow.path:
            of_port = packets if self._by_class and port.name != flow.own else rank
            queue = port.queues.get(of_port)
            if queue is None:
                queue = port.queues[of_port] = _Queue(port, of_port)
                port.in_order = None
            queue.flows[flow.id] = flow
            queue.offer, queue.told = port.bandwidth, False  # the newcomer is told even an offer that stays
            queues.append(queue)
            port.floored += floored
            port.stale = True
            self._changed[port] = None
        flow.queues = queues

    def _leave(self, flow: FluidFlow) -> None:
        floored = flow.turn.floor > 0
        for queue in flow.queues:
            port = queue.port
            del queue.flows[flow.id]
            if not queue.flows:
                del port.queues[queue.rank]
                port.in_order = None
            port.floored -= floored
            port.stale = True
            self._changed[port] = None

    def _remove(self, flow: FluidFlow, now: float) -> None:
        self.moved_bytes += flow.left - flow.left_at(now)
        del self._flows[flow.id]
        self._leave(flow)


def _divide(port: _Port) -> list[FluidFlow]:
    """Compute the port's offers again. The flows whose offer here changed."""
    changed: list[FluidFlow] = []
    floors = _floors(port) if port.floored else {}
    room = port.bandwidth - sum(floors.values())
    smallest = TOLERANCE * port.bandwidth
    if port.in_order is None:
        port.in_order = sorted(port.queues.values(), key=_rank_of)
    port.stale = False
    for queue in port.in_order:
        if floors:
            room += floors.get(queue.rank, 0.0)
        offer = 0.0
        if room:
            limits = [(flow.limit(queue), flow.singles) for flow in queue.flows.values()]
            if len(limits) == 1:  # as most are
                limit, singles = limits[0]
                total = limit * singles
                offer = limit + (room - total) / singles if total <= room else room / singles
                room = max(0.0, room - singles * min(limit, offer))
            else:
                offer = _offer(limits, room)
                room = max(0.0, room - sum([singles * min(limit, offer) for limit, singles in limits]))
        if not queue.told or abs(offer - queue.offer) > smallest:
            queue.offer, queue.told = offer, True
            _mark_others(queue)
            changed += queue.flows.values()
    return changed


_rank_of = attrgetter("rank")


def _mark_others(queue: _Queue) -> None:
    """What the other ports on the way of these flows divide is another now."""
    here = queue.port
    for flow in queue.flows.values():
        for port in flow.path:
            if port is not here:
                port.stale = True


def _floors(port: _Port) -> dict[Rank, float]:
    """What ranks with a floor get before all others, at most what they can use."""
    found = {}
    for rank, queue in port.queues.items():
        floor = max(flow.turn.floor for flow in queue.flows.values())
        if floor:
            usable = sum(flow.singles * flow.limit(queue) for flow in queue.flows.values())
            found[rank] = min(floor * port.bandwidth, usable)
    return found


def _offer(limits: Sequence[tuple[float, int]], room: float) -> float:
    """The rate that fills `room` if each single flow takes it or its own limit, whichever is smaller. `limits`: of
    single flows, and how many have each.

    If the limits leave room, one flow more could have its limit and all of that.
    """
    total = sum([limit * singles for limit, singles in limits])
    if total <= room:
        most, singles = max(limits)
        return most + (room - total) / singles
    left, count = room, sum([singles for _, singles in limits])
    for limit, singles in sorted(limits):
        if limit * count > left:
            return left / count
        left -= limit * singles
        count -= singles
    return max(limits)[0]  # they are too much by no more than rounding
