"""Runs flows over a network whose senders are stopped and started by the transfer daemon's own `Gate`.

`FlowRun` shares each port to the byte by the policy's order, which is what the papers' schedulers assume and what their
figures are of. A daemon cannot do that: it lets a sender go or holds it, assumes that one takes its whole port until it
was measured, and knows the flows of its own host alone. Here each sending host has a `Gate`, so its decisions are those
of the daemon, and the network does the rest as links do: what goes shares ports by the class of its packets, max-min
within one.

Left out are the bytes that a sender has in the kernel when it is stopped, the way of a message to the daemon and back,
TCP's search for its share, and clients that no longer wait for a permit.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from controller.flow.flows import FlowStage, MsFlow
from controller.flow.gate import Gate, GateConfig, Go
from controller.flow.policies import FlowPolicy, Turn
from controller.flow.scheduler import (
    BatchComputed,
    FlowEvent,
    FlowScheduler,
    FlowSchedulerConfig,
    LayerStarted,
    OrderSent,
)
from controller.simulator.flows.fluid import FluidNetwork
from controller.simulator.flows.wakes import Wakes

LATE_S = 1e-3  # a transfer that is late already counts as due so soon, as a daemon's clients say
SHORTEST_PAUSE_S = 1e-3  # between two steps of a daemon that nobody asked for
HELD = Turn((math.inf,), cap=0.0)
LAST_CLASS = 7  # of eight; packets without a mark have it


@dataclass(slots=True)
class _GatedHost:
    """`step_at`, `report_at`: when its gate has to be called, and when its clients say how far they are."""

    gate: Gate
    flows: dict[str, MsFlow] = field(default_factory=dict)  # that are scheduled
    step_at: float = math.inf
    report_at: float = math.inf

    @property
    def wake_at(self) -> float:
        return min(self.step_at, self.report_at)


@dataclass(slots=True)
class GatedRun:
    """Network and gates on one virtual clock; used as a `FlowRun` is. `ends` has when flows ended, seconds.

    `ports`: bandwidths in bytes/s. `bandwidth`: bytes/s that daemons are told of every port, headers included.
    `report_s`: how often clients report what is left. `unscheduled`: flows that a gate did not take or gave up.
    """

    ports: Mapping[str, float]
    policy: Callable[[], FlowPolicy]
    bandwidth: float
    period_s: float = 0.02
    report_s: float = 0.05
    gate: GateConfig = field(default_factory=GateConfig)
    now: float = 0.0
    ends: dict[str, float] = field(default_factory=dict)
    unscheduled: set[str] = field(default_factory=set)
    network: FluidNetwork = field(init=False)
    _hosts: dict[str, _GatedHost] = field(init=False, default_factory=dict)
    _flows: dict[str, MsFlow] = field(init=False, default_factory=dict)
    _wakes: Wakes = field(init=False, default_factory=Wakes)

    def __post_init__(self) -> None:
        self.network = FluidNetwork(self.ports)

    def submit(self, flow: MsFlow, path: Sequence[str] | None = None) -> None:
        """The flow is ready now, and held until its host's gate lets it go. Its host is its egress port."""
        host = self._host(flow.egress)
        self._flows[flow.id] = flow
        through = path or (flow.egress, flow.ingress)
        self.network.start(flow.id, through, flow.size_bytes, HELD, self.now, flow.singles, flow.egress)
        if host.gate.submit(self._as_told(flow), self.now) is not None:
            self._give_up(host, flow.id)
            return
        host.flows[flow.id] = flow
        if math.isinf(host.report_at):
            host.report_at = self.now + self.report_s
        self._soon(flow.egress)

    def submit_all(self, flows: Sequence[tuple[MsFlow, Sequence[str] | None]]) -> None:
        for flow, path in flows:
            self.submit(flow, path)

    def tell(self, host: str, events: Sequence[FlowEvent]) -> None:
        """What a daemon hears of computing and of the coordinator. Other events are left out."""
        gate = self._host(host).gate
        for event in events:
            match event:
                case LayerStarted(unit, batch, layer):
                    gate.layer_started(unit, batch, layer, self.now)
                case BatchComputed(unit, batch):
                    gate.computed(unit, batch)
                case OrderSent():
                    gate.obey(event)
                case _:
                    continue
            self._soon(host)

    def hosts(self) -> list[str]:
        return list(self._hosts)

    def next_event(self) -> float:
        """When a flow ends or a gate has something to do; infinite if nothing moves."""
        self.network.settle(self.now)
        return min(self.network.next_end(), self._wakes.first())

    def advance(self, to: float) -> list[MsFlow]:
        """Go to this moment, at most the next event. The flows that ended."""
        self.now = to
        ended = []
        for flow_id in self.network.advance(to):
            self.ends[flow_id] = to
            flow = self._flows.pop(flow_id)
            ended.append(flow)
            host = self._hosts[flow.egress]
            host.flows.pop(flow_id, None)
            host.gate.end(flow_id)
            self._soon(flow.egress)
        for name in self._wakes.due(to):
            self._wake(name)
        return ended

    def _wake(self, name: str) -> None:
        host = self._hosts[name]
        if host.report_at <= self.now:
            for flow_id in host.flows:
                host.gate.progress(flow_id, self.network.left(flow_id, self.now), False, self.now)
            host.report_at = self.now + self.report_s if host.flows else math.inf
        if host.step_at <= self.now:
            self._step(host)
        self._wakes.set(name, host.wake_at)

    def _step(self, host: _GatedHost) -> None:
        actions, wake_at = host.gate.step(self.now)
        for action in actions:
            if isinstance(action, Go):
                self.network.turn(action.flow_id, _going(action.turn.wire_class) if action.go else HELD)
            else:
                self._give_up(host, action.flow_id)
        host.step_at = max(wake_at, self.now + SHORTEST_PAUSE_S)

    def _give_up(self, host: _GatedHost, flow_id: str) -> None:
        """It goes on without a schedule, as unmarked packets."""
        host.flows.pop(flow_id, None)
        self.unscheduled.add(flow_id)
        self.network.turn(flow_id, _going(LAST_CLASS))

    def _soon(self, name: str) -> None:
        """Step once for all that happens now."""
        host = self._hosts[name]
        if host.step_at > self.now:
            host.step_at = self.now
            self._wakes.set(name, self.now)

    def _host(self, name: str) -> _GatedHost:
        host = self._hosts.get(name)
        if host is None:
            scheduler = FlowScheduler(self.policy(), FlowSchedulerConfig(self.period_s, lazy=True))
            host = self._hosts[name] = _GatedHost(Gate(scheduler, self.bandwidth, self.gate))
        return host

    def _as_told(self, flow: MsFlow) -> MsFlow:
        """What a client says of it: a deadline that may still be kept, and no requests of a collective."""
        requests = () if flow.stage is FlowStage.COLLECTIVE else flow.requests[:1]
        deadline = None if flow.deadline is None else max(flow.deadline, self.now + LATE_S)
        return replace(flow, requests=requests, deadline=deadline)


def _going(wire_class: int) -> Turn:
    """Of a flow that sends: ports know no more of it than the class of its packets."""
    return Turn((float(wire_class),), wire_class=wire_class)
