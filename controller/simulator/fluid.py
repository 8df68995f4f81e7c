"""A network of ports as fluid flows, with exact events: strict ranks, max-min sharing within a rank, caps and floors.

A flow goes through a path of ports (its sender's, those of the fabric, its receiver's) and moves as fast as the slowest
lets it. Ranks are served one after the other, each from what the ranks before it left; within a rank rates grow evenly
until a port or a cap stops them (progressive filling). `floor` gives a rank a share of each of its ports first.

Rates change only when a flow starts, ends, or gets another turn, and only where its change can be felt: among the flows
that share a port with it, directly or through others.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable, Mapping, Sequence

from controller.core.errors import ConfigError
from controller.flow.policies import Turn

SMALLEST = 1e-9  # bytes or bytes/s that are rounding


class FluidFlow:
    """`left`: bytes at `at`; `rate`: bytes/s since then."""

    __slots__ = ("at", "id", "left", "path", "rate", "size", "turn", "version")

    def __init__(self, flow_id: str, path: Sequence[str], size: float, now: float) -> None:
        self.id = flow_id
        self.path = tuple(path)
        self.size = float(size)
        self.left = float(size)
        self.at = now
        self.rate = 0.0
        self.turn = Turn((math.inf,))
        self.version = 0

    def left_at(self, now: float) -> float:
        return max(0.0, self.left - self.rate * (now - self.at))


class FluidNetwork:
    """Flows by id. A driver calls `advance` at `next_end` or before anything else happens, and then `settle`."""

    def __init__(self, ports: Mapping[str, float]) -> None:
        """`ports`: bandwidth in bytes/s. Raises ConfigError."""
        for port, bandwidth in ports.items():
            if not bandwidth > 0:
                raise ConfigError(f"port {port!r}: bandwidth must be positive bytes/s", field="bandwidth")
        self._bandwidth = dict(ports)
        self._flows: dict[str, FluidFlow] = {}
        self._on: dict[str, dict[str, FluidFlow]] = {port: {} for port in ports}
        self._changed: set[str] = set()  # ports
        self._ends: list[tuple[float, int, str]] = []
        self.moved_bytes = 0.0

    def __len__(self) -> int:
        return len(self._flows)

    def start(self, flow_id: str, path: Sequence[str], size: float, turn: Turn, now: float) -> None:
        """Raises ConfigError for a size that is not positive, an unknown port, or an id that is in use."""
        if not size > 0:
            raise ConfigError("size must be positive bytes", field="size")
        if flow_id in self._flows:
            raise ConfigError(f"flow {flow_id!r} has started", field="id")
        if unknown := [port for port in path if port not in self._bandwidth]:
            raise ConfigError(f"unknown port {unknown[0]!r}", field="path")
        flow = self._flows[flow_id] = FluidFlow(flow_id, path, size, now)
        flow.turn = turn
        for port in flow.path:
            self._on[port][flow_id] = flow
        self._changed.update(flow.path)

    def turn(self, flow_id: str, turn: Turn) -> None:
        flow = self._flows.get(flow_id)
        if flow is not None and flow.turn != turn:
            flow.turn = turn
            self._changed.update(flow.path)

    def cancel(self, flow_id: str, now: float) -> None:
        flow = self._flows.get(flow_id)
        if flow is not None:
            self._remove(flow, now)

    def advance(self, now: float) -> list[str]:
        """The flows that have ended by `now`, in order of their end."""
        ended = []
        while self._ends and self._ends[0][0] <= now + 1e-12:
            _, version, flow_id = heapq.heappop(self._ends)
            flow = self._flows.get(flow_id)
            if flow is not None and flow.version == version:
                self._remove(flow, now)
                ended.append(flow_id)
        return ended

    def next_end(self) -> float:
        """When the next flow ends if nothing changes; infinite if none moves. Call `settle` before."""
        while self._ends:
            at, version, flow_id = self._ends[0]
            flow = self._flows.get(flow_id)
            if flow is not None and flow.version == version:
                return at
            heapq.heappop(self._ends)
        return math.inf

    def left(self, flow_id: str, now: float) -> float:
        flow = self._flows.get(flow_id)
        return flow.left_at(now) if flow is not None else 0.0

    def rates(self, port: str) -> dict[float, float]:
        """Bytes/s of a port by band (`Turn.rank[0]`)."""
        found: dict[float, float] = {}
        for flow in self._on[port].values():
            found[flow.turn.rank[0]] = found.get(flow.turn.rank[0], 0.0) + flow.rate
        return found

    def settle(self, now: float) -> None:
        """Divide the ports anew where something has changed."""
        if not self._changed:
            return
        flows, ports = self._concerned()
        self._changed.clear()
        before = {flow.id: flow.rate for flow in flows}
        for flow in flows:
            left = flow.left_at(now)
            self.moved_bytes += flow.left - left
            flow.left, flow.at = left, now
        self._divide(flows, ports)
        for flow in flows:
            if flow.rate != before[flow.id] or not flow.version:
                flow.version += 1
                if flow.rate > SMALLEST:
                    heapq.heappush(self._ends, (now + flow.left / flow.rate, flow.version, flow.id))

    def _remove(self, flow: FluidFlow, now: float) -> None:
        self.moved_bytes += flow.left - flow.left_at(now)
        del self._flows[flow.id]
        for port in flow.path:
            del self._on[port][flow.id]
        self._changed.update(flow.path)

    def _concerned(self) -> tuple[list[FluidFlow], list[str]]:
        """Everything that shares a port with what changed, directly or through others."""
        ports = list(self._changed)
        known = set(ports)
        flows: dict[str, FluidFlow] = {}
        for port in ports:  # grows while it is read
            for flow_id, flow in self._on[port].items():
                if flow_id not in flows:
                    flows[flow_id] = flow
                    for other in flow.path:
                        if other not in known:
                            known.add(other)
                            ports.append(other)
        return list(flows.values()), ports

    def _divide(self, flows: Sequence[FluidFlow], ports: Sequence[str]) -> None:
        room = {port: self._bandwidth[port] for port in ports}
        for flow in flows:
            flow.rate = 0.0
        tiers: dict[tuple[float, ...], list[FluidFlow]] = {}
        for flow in flows:
            tiers.setdefault(flow.turn.rank, []).append(flow)
        for tier in tiers.values():
            floor = max(flow.turn.floor for flow in tier)
            if floor:
                kept = {port: floor * self._bandwidth[port] for flow in tier for port in flow.path}
                given = dict(kept)
                _fill(tier, given)
                for port, before in kept.items():
                    room[port] -= before - given[port]
        for rank in sorted(tiers):
            _fill(tiers[rank], room)


def _fill(tier: Iterable[FluidFlow], room: dict[str, float]) -> None:
    """Raise the rates of all flows evenly until a port is full or a cap is reached; takes it from `room`."""
    growing = [flow for flow in tier if not _capped(flow)]
    counts: dict[str, int] = {}
    for flow in growing:
        for port in flow.path:
            counts[port] = counts.get(port, 0) + 1
    while growing:
        step = _step(growing, counts, room)
        for flow in growing:
            flow.rate += step
        full = set()
        for port, count in counts.items():
            room[port] -= step * count
            if count and room[port] <= SMALLEST * count:
                room[port] = 0.0
                full.add(port)
        staying = [flow for flow in growing if not _capped(flow) and full.isdisjoint(flow.path)]
        if len(staying) == len(growing):
            return  # only rounding is left
        for flow in growing:
            for port in flow.path if _capped(flow) or not full.isdisjoint(flow.path) else ():
                counts[port] -= 1
        growing = staying


def _capped(flow: FluidFlow) -> bool:
    return flow.turn.cap is not None and flow.rate >= flow.turn.cap - SMALLEST


def _step(growing: Sequence[FluidFlow], counts: Mapping[str, int], room: Mapping[str, float]) -> float:
    """By how much all rates can grow."""
    shares = [max(0.0, room[port]) / count for port, count in counts.items() if count]
    return min(*shares, *(flow.turn.cap - flow.rate for flow in growing if flow.turn.cap is not None), math.inf)
