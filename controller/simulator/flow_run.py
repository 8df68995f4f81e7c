"""Runs flows over a fluid network under a flow policy: one `FlowScheduler` for each sending host, as a daemon has."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from controller.flow.flows import MsFlow
from controller.flow.policies import FlowPolicy, Turn
from controller.flow.scheduler import (
    Ended,
    FlowEvent,
    FlowScheduler,
    FlowSchedulerConfig,
    Permit,
    PortSeen,
    Sent,
    Submitted,
)
from controller.simulator.fluid import FluidNetwork


class PlannedFlow(NamedTuple):
    """A flow that is ready `at` seconds and goes through `path` (its egress and ingress port if None)."""

    at: float
    flow: MsFlow
    path: Sequence[str] | None = None


@dataclass(slots=True)
class FlowRun:
    """Network and schedulers on one virtual clock. `step` moves to the next event; `ends` are the flows' ends."""

    ports: Mapping[str, float]
    policy: Callable[[], FlowPolicy]
    config: FlowSchedulerConfig = field(default_factory=FlowSchedulerConfig)
    now: float = 0.0
    ends: dict[str, float] = field(default_factory=dict)
    network: FluidNetwork = field(init=False)
    _schedulers: dict[str, FlowScheduler] = field(init=False, default_factory=dict)
    _wake: dict[str, float] = field(init=False, default_factory=dict)
    _host_of: dict[str, str] = field(init=False, default_factory=dict)
    _flows: dict[str, MsFlow] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        self.network = FluidNetwork(self.ports)

    def submit(self, flow: MsFlow, path: Sequence[str] | None = None) -> None:
        host = flow.egress
        self._flows[flow.id], self._host_of[flow.id] = flow, host
        self.network.start(flow.id, path or (flow.egress, flow.ingress), flow.size_bytes, Turn((math.inf,)), self.now)
        self._report(host, [Submitted(flow)], (flow.egress, flow.ingress))

    def tell(self, host: str, events: Sequence[FlowEvent]) -> None:
        """Events of computing or an order reach the scheduler of one host (its egress port)."""
        self._report(host, events)

    def next_event(self) -> float:
        self.network.settle(self.now)
        return min(self.network.next_end(), min(self._wake.values(), default=math.inf))

    def advance(self, to: float) -> list[str]:
        """Go to this moment, at most the next event. The flows that ended."""
        self.now = to
        ended = self.network.advance(to)
        hosts: dict[str, list[FlowEvent]] = {}
        for flow_id in ended:
            self.ends[flow_id] = to
            hosts.setdefault(self._host_of.pop(flow_id), []).append(Ended(flow_id))
            del self._flows[flow_id]
        for host, at in self._wake.items():
            if at <= to:
                hosts.setdefault(host, [])
        self.network.settle(to)
        for host, events in hosts.items():
            self._report(host, events)
        return ended

    def _report(self, host: str, events: Sequence[FlowEvent], ports: Sequence[str] = ()) -> None:
        scheduler = self._schedulers.get(host)
        if scheduler is None:
            scheduler = self._schedulers[host] = FlowScheduler(self.policy(), self.config)
        mine = [flow for flow_id, flow in self._flows.items() if self._host_of[flow_id] == host]
        seen = dict.fromkeys([*ports, *(port for flow in mine for port in (flow.egress, flow.ingress))])
        reports: list[FlowEvent] = [PortSeen(port, self.ports[port], self.network.rates(port)) for port in seen]
        reports += [Sent(flow.id, self.network.left(flow.id, self.now)) for flow in mine]
        actions, wake_at = scheduler.handle([*reports, *events], self.now)
        self._wake[host] = wake_at
        for action in actions:
            if isinstance(action, Permit):
                self.network.turn(action.flow_id, action.turn)


def run_flows(
    plan: Sequence[PlannedFlow],
    ports: Mapping[str, float],
    policy: Callable[[], FlowPolicy],
    config: FlowSchedulerConfig | None = None,
) -> dict[str, float]:
    """When each flow of the plan ends, seconds, with nothing computed in between."""
    run = FlowRun(ports, policy, config or FlowSchedulerConfig())
    waiting = sorted(plan, key=lambda planned: planned.at)
    while waiting or len(run.network):
        at = min(run.next_event(), waiting[0].at if waiting else math.inf)
        if at == math.inf:
            raise RuntimeError(f"{len(run.network)} flows do not move")
        run.advance(at)
        while waiting and waiting[0].at <= at:
            planned = waiting.pop(0)
            run.submit(planned.flow, planned.path)
    return run.ends
