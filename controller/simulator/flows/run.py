"""Runs flows over a fluid network under a flow policy: one `FlowScheduler` for each sending host, as a daemon has."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from controller.flow.flows import MsFlow
from controller.flow.policies import FlowPolicy
from controller.flow.scheduler import (
    Ended,
    FlowEvent,
    FlowProgress,
    FlowScheduler,
    FlowSchedulerConfig,
    Permit,
    PortSeen,
    Submitted,
)
from controller.simulator.flows.fluid import FluidNetwork
from controller.simulator.flows.wakes import Wakes


class PlannedFlow(NamedTuple):
    """A flow that is ready `at` seconds and goes through `path` (its egress and ingress port if None)."""

    at: float
    flow: MsFlow
    path: Sequence[str] | None = None


@dataclass(slots=True)
class _Host:
    """A sending host: its scheduler and its flows."""

    scheduler: FlowScheduler
    flows: dict[str, MsFlow] = field(default_factory=dict)
    ports: dict[str, int] = field(default_factory=dict)  # and how many of the flows use each
    reported_at: float = -math.inf


@dataclass(slots=True)
class FlowRun:
    """Network and schedulers on one virtual clock. `advance` goes to the next event; `ends` has when flows ended.

    `report_s`: how old a scheduler's view of its ports' load and of the bytes left may be (0: never old). `by_class`:
    what is not a sender's own port knows only classes of packets (`FluidNetwork`).
    """

    ports: Mapping[str, float]
    policy: Callable[[], FlowPolicy]
    config: FlowSchedulerConfig = field(default_factory=FlowSchedulerConfig)
    report_s: float = 0.0
    by_class: bool = False
    now: float = 0.0
    ends: dict[str, float] = field(default_factory=dict)
    network: FluidNetwork = field(init=False)
    _hosts: dict[str, _Host] = field(init=False, default_factory=dict)
    _flows: dict[str, MsFlow] = field(init=False, default_factory=dict)
    _wakes: Wakes = field(init=False, default_factory=Wakes)

    def __post_init__(self) -> None:
        self.network = FluidNetwork(self.ports, self.by_class)

    def submit(self, flow: MsFlow, path: Sequence[str] | None = None) -> None:
        """The flow is ready now. Its host is its egress port."""
        self.submit_all([(flow, path)])

    def submit_all(self, flows: Sequence[tuple[MsFlow, Sequence[str] | None]]) -> None:
        """Flows of one host that are ready now, with their paths: it is called once."""
        name = flows[0][0].egress
        host = self._host(name)
        events = self._reports(host)
        for flow, path in flows:
            self._flows[flow.id] = host.flows[flow.id] = flow
            for port in (flow.egress, flow.ingress):
                if port not in host.ports:
                    events.append(PortSeen(port, self.network.bandwidth(port)))
                    host.ports[port] = 0
            for port in {flow.egress, flow.ingress}:
                host.ports[port] += 1
            through = path or (flow.egress, flow.ingress)
            self.network.start(flow.id, through, flow.size_bytes, None, self.now, flow.singles, flow.egress)
        events += [Submitted(flow) for flow, _ in flows]
        self._handle(name, host, events)

    def cancel(self, flow_id: str) -> None:
        """It is given up now, and its host hears of it. One that has ended is left out."""
        if flow_id in self._flows:
            events: dict[str, list[FlowEvent]] = {}
            self.network.cancel(flow_id, self.now)
            self._forget(flow_id, events)
            for host, of in events.items():
                self._call(host, of)

    def tell(self, host: str, events: Sequence[FlowEvent]) -> None:
        """Events of computing or an order reach the scheduler of one host."""
        self._call(host, events)

    def hosts(self) -> list[str]:
        return list(self._hosts)

    def next_event(self) -> float:
        """When a flow ends or a scheduler has to be called; infinite if nothing moves."""
        self.network.settle(self.now)
        return min(self.network.next_end(), self._wakes.first())

    def advance(self, to: float) -> list[MsFlow]:
        """Go to this moment, at most the next event. The flows that ended."""
        self.now = to
        events: dict[str, list[FlowEvent]] = {}
        ended = []
        for flow_id in self.network.advance(to):
            self.ends[flow_id] = to
            ended.append(self._forget(flow_id, events))
        for name in self._wakes.due(to):
            events.setdefault(name, [])
        if events:
            self.network.settle(to)
        for name, of in events.items():
            self._call(name, of)
        return ended

    def _forget(self, flow_id: str, events: dict[str, list[FlowEvent]]) -> MsFlow:
        """Take an ended flow from its host, which hears of it."""
        flow = self._flows.pop(flow_id)
        host = self._hosts[flow.egress]
        del host.flows[flow_id]
        for port in {flow.egress, flow.ingress}:
            host.ports[port] -= 1
            if not host.ports[port]:
                del host.ports[port]
        events.setdefault(flow.egress, []).append(Ended(flow_id))
        return flow

    def _host(self, name: str) -> _Host:
        host = self._hosts.get(name)
        if host is None:
            host = self._hosts[name] = _Host(FlowScheduler(self.policy(), self.config))
        return host

    def _reports(self, host: _Host) -> list[FlowEvent]:
        """What a daemon knows of flows and ports, if it is time: what its own host's flows take of ports. Others that
        come to the same receiver are known to their own daemons."""
        if self.now - host.reported_at < self.report_s:
            return []
        host.reported_at = self.now
        if not host.flows:
            return []
        network, rates = self.network, self.network.rates(host.flows)
        found: list[FlowEvent] = [PortSeen(port, network.bandwidth(port), rates.get(port, {})) for port in host.ports]
        found += [FlowProgress(flow_id, network.left(flow_id, self.now)) for flow_id in host.flows]
        return found

    def _call(self, name: str, events: Sequence[FlowEvent]) -> None:
        host = self._host(name)
        self._handle(name, host, [*self._reports(host), *events])

    def _handle(self, name: str, host: _Host, events: Sequence[FlowEvent]) -> None:
        actions, wake_at = host.scheduler.handle(events, self.now)
        self._wakes.set(name, wake_at)
        for action in actions:
            if isinstance(action, Permit):
                self.network.turn(action.flow_id, action.turn)


def run_flows(
    plan: Sequence[PlannedFlow],
    ports: Mapping[str, float],
    policy: Callable[[], FlowPolicy],
    config: FlowSchedulerConfig | None = None,
    report_s: float = 0.0,
    by_class: bool = False,
) -> dict[str, float]:
    """When each flow of the plan ends, seconds, with nothing computed in between. Raises RuntimeError if one never
    does.
    """
    run = FlowRun(ports, policy, config or FlowSchedulerConfig(), report_s, by_class)
    waiting = sorted(plan, key=lambda planned: planned.at)
    following = 0
    while following < len(waiting) or len(run.network):
        at = min(run.next_event(), waiting[following].at if following < len(waiting) else math.inf)
        if at == math.inf:
            raise RuntimeError(f"{len(run.network)} flows do not move")
        run.advance(at)
        while following < len(waiting) and waiting[following].at <= at:
            run.submit(waiting[following].flow, waiting[following].path)
            following += 1
    return run.ends
