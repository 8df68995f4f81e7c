"""The network between instances: which KV transfers and weight loads share a port, and how long each takes.

It is the flow network of `controller/simulator/flows`: one switch, on which every instance has a port in each
direction. What shares a port shares it max-min fairly. With a flow policy each sending instance has the scheduler of a
transfer daemon, which knows its own flows alone, and receiving ports serve by the class of packets.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from controller.core.errors import ConfigError
from controller.core.pruning import OpenKv
from controller.flow.flows import FlowStage, MsFlow
from controller.flow.gate import GATED, OFF, GateConfig
from controller.flow.policies import FLOW_POLICIES, FairSharing
from controller.flow.scheduler import FlowSchedulerConfig, OrderSent
from controller.simulator.flows.run import FlowRun

SCOPES = ("port", "pair", "fabric")
LINK_POLICIES = (OFF, *GATED)
PERIOD_S = 0.02  # how often a transfer daemon may promote transfers
NO_TARGET_S = 30.0  # until a transfer of a request without a TTFT target is due, as for a daemon's clients
GIGA = 1e9


@dataclass(frozen=True, slots=True)
class LinkFailure:
    """The port of instance number `instance` is down from `at` for `for_s` seconds; transfers on it are lost."""

    instance: int
    at: float
    for_s: float

    def __post_init__(self) -> None:
        if self.at < 0:
            raise ConfigError("a failure's time must not be negative", field="links.failures.at")
        if not self.for_s > 0:
            raise ConfigError("for_s must be positive seconds", field="links.failures.for_s")


@dataclass(frozen=True, slots=True)
class PortSpeed:
    """The port of instance number `instance` has a bandwidth of its own."""

    instance: int
    bandwidth_gb_s: float

    def __post_init__(self) -> None:
        if not self.bandwidth_gb_s > 0:
            raise ConfigError("bandwidth_gb_s must be positive", field="links.ports.bandwidth_gb_s")


@dataclass(frozen=True, slots=True)
class LinkSettings:
    """The network of a run.

    - `bandwidth_gb_s`: 1e9 bytes/s in each direction; the default is a 400 Gb/s port. `latency_s`: of a whole transfer.
    - `scope`: what shares the bandwidth: each instance's port and direction, each pair of instances, or all of them.
    - `overlap`: engines give out KV during the prefill, as the reference engine does. The decode stage may be placed
      when the last step of the prefill begins. From then on all but the last of `layers` layers move, and the last one
      once the prefill has ended. (In reality layer follows layer; at an even rate both end at the same time.)
    - `ports`: ports that differ. Engines then report the bandwidth of their links to the migrator, as real ones measure
      it when they join.
    - `flow_policy`: by which transfer daemons order what each instance sends; off: no daemons, equal shares.
    """

    bandwidth_gb_s: float = 50.0
    latency_s: float = 0.001
    scope: str = "port"
    overlap: bool = False
    layers: int = 32
    failures: tuple[LinkFailure, ...] = ()
    ports: tuple[PortSpeed, ...] = ()
    flow_policy: str = OFF

    def __post_init__(self) -> None:
        if not self.bandwidth_gb_s > 0:
            raise ConfigError("bandwidth_gb_s must be positive", field="links.bandwidth_gb_s")
        if self.latency_s < 0:
            raise ConfigError("latency_s must not be negative", field="links.latency_s")
        if self.scope not in SCOPES:
            raise ConfigError(f"unknown scope {self.scope!r}; valid: {', '.join(SCOPES)}", field="links.scope")
        if self.layers < 1:
            raise ConfigError("layers must be at least 1", field="links.layers")
        if self.flow_policy not in LINK_POLICIES:
            valid = ", ".join(LINK_POLICIES)
            raise ConfigError(f"unknown flow policy {self.flow_policy!r}; valid: {valid}", field="links.flow_policy")
        if self.flow_policy != OFF and self.scope != "port":
            raise ConfigError("a flow policy orders what shares a port: scope must be port", field="links.flow_policy")


@dataclass(frozen=True, slots=True)
class NetworkTransfer:
    """Bytes from one instance to another.

    `due`: when the last byte of a KV transfer is due, seconds of the run; None: a weight load. `pace_gb_s`: the most
    that its ends can do (None: no bound).
    """

    name: str
    source: str
    target: str
    size: float
    due: float | None = None
    pace_gb_s: float | None = None


class Network:
    """Transfers by name. After a start, cancel or end ask for `next_event` again, since every rate may have changed."""

    def __init__(self, settings: LinkSettings, port_gb_s: Callable[[str], float] | None = None) -> None:
        """`port_gb_s`: bandwidth of an instance's port, if ports differ. It stays as it is when first used."""
        self.settings = settings
        self._port_gb_s = port_gb_s or (lambda instance_id: settings.bandwidth_gb_s)
        ordered = settings.flow_policy != OFF
        self._run = FlowRun(
            {},
            FLOW_POLICIES[settings.flow_policy] if ordered else FairSharing,
            FlowSchedulerConfig(PERIOD_S),
            report_s=GateConfig().window_s if ordered else math.inf,
            by_class=ordered,
        )
        self._moving: dict[str, NetworkTransfer] = {}
        self._ended: list[str] = []  # that nobody has asked for yet
        self._moved = 0.0

    def __len__(self) -> int:
        return len(self._moving)

    @property
    def moved_bytes(self) -> float:
        """Of KV, by the last start, cancel or end."""
        moving = (each for each in self._moving.values() if each.due is not None and each.name not in self._ended)
        return self._moved + sum(each.size - self._run.network.left(each.name, self._run.now) for each in moving)

    def start(self, transfer: NetworkTransfer, now: float) -> None:
        """Raises ConfigError if one of this name moves."""
        self._advance(now)
        if transfer.name in self._moving:
            raise ConfigError(f"transfer {transfer.name!r} moves already", field="name")
        self._moving[transfer.name] = transfer
        if transfer.size <= 0:
            self._ended.append(transfer.name)
            return
        ports = self._ports(transfer.source, transfer.target)
        names = list(ports)
        if transfer.pace_gb_s is not None:
            ports[f"{transfer.name} pace"] = transfer.pace_gb_s
        for port, gb_s in ports.items():
            self._run.network.add_port(port, gb_s * GIGA)
        stage = FlowStage.WEIGHTS if transfer.due is None else FlowStage.KV_TRANSFER
        requests = () if transfer.due is None else (transfer.name,)
        flow = MsFlow(
            transfer.name, stage, transfer.size, names[0], names[-1], requests=requests, deadline=transfer.due
        )
        self._run.submit(flow, tuple(ports))

    def cancel(self, name: str, now: float) -> bool:
        """False if there is no such transfer."""
        self._advance(now)
        transfer = self._moving.pop(name, None)
        if transfer is None:
            return False
        if name in self._ended:
            self._ended.remove(name)
            return True
        self._count(transfer, self._run.network.left(name, now))
        self._run.cancel(name)
        return True

    def open_kv(self, now: float) -> dict[str, OpenKv] | None:
        """What daemons say of the KV that is being sent; None without daemons."""
        if self.settings.flow_policy == OFF:
            return None
        self._advance(now)
        moving = (each for each in self._moving.values() if each.due is not None and each.name not in self._ended)
        left = self._run.network.left
        return {each.name: OpenKv(each.source, left(each.name, now) / each.size, each.target) for each in moving}

    def touching(self, instance_id: str) -> list[str]:
        return [each.name for each in self._moving.values() if instance_id in (each.source, each.target)]

    def loads_from(self, instance_id: str) -> int:
        """How many weight loads it sends."""
        return sum(each.due is None and each.source == instance_id for each in self._moving.values())

    def obey(self, order: OrderSent, now: float) -> None:
        """Orders of the coordinator came to the daemons; without daemons they change nothing."""
        if self.settings.flow_policy != OFF:
            self._advance(now)
            for host in self._run.hosts():
                self._run.tell(host, [order])

    @property
    def next_event(self) -> float:
        """When a transfer has sent its last byte, or a daemon looks at its own again; infinite if there are none."""
        return self._run.now if self._ended else self._run.next_event()

    def ended(self, now: float) -> list[str]:
        """Remove and return those that have sent their last byte."""
        self._advance(now)
        ended, self._ended = self._ended, []
        for name in ended:
            del self._moving[name]
        return ended

    def _advance(self, now: float) -> None:
        for flow in self._run.advance(now):
            self._ended.append(flow.id)
            self._count(self._moving[flow.id], 0.0)

    def _count(self, transfer: NetworkTransfer, left: float) -> None:
        if transfer.due is not None:
            self._moved += transfer.size - left

    def _ports(self, source: str, target: str) -> dict[str, float]:
        """The sending port and the receiving one, or what stands for both, with their GB/s."""
        if self.settings.scope == "port":
            return {f"{source} out": self._port_gb_s(source), f"{target} in": self._port_gb_s(target)}
        if self.settings.scope == "pair":
            return {f"{source} to {target}": min(self._port_gb_s(source), self._port_gb_s(target))}
        return {"fabric": self.settings.bandwidth_gb_s}
