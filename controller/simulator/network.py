"""The network between instances as flows: which KV transfers share a port, and how long each takes.

Every instance has one port, whose bandwidth is divided evenly among its transfers in each direction. A transfer is as
fast as the smaller of its two shares. (A share that it cannot use at one end is not given to others: a lower bound of
max-min fairness, equal to it while the same ends are busy.)
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from controller.core.errors import ConfigError

SCOPES = ("port", "pair", "fabric")
GIGA = 1e9
OUT, IN, FABRIC = SIDES = ("(out)", "(in)", "(fabric)")


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
    """

    bandwidth_gb_s: float = 50.0
    latency_s: float = 0.001
    scope: str = "port"
    overlap: bool = False
    layers: int = 32
    failures: tuple[LinkFailure, ...] = ()
    ports: tuple[PortSpeed, ...] = ()

    def __post_init__(self) -> None:
        if not self.bandwidth_gb_s > 0:
            raise ConfigError("bandwidth_gb_s must be positive", field="links.bandwidth_gb_s")
        if self.latency_s < 0:
            raise ConfigError("latency_s must not be negative", field="links.latency_s")
        if self.scope not in SCOPES:
            raise ConfigError(f"unknown scope {self.scope!r}; valid: {', '.join(SCOPES)}", field="links.scope")
        if self.layers < 1:
            raise ConfigError("layers must be at least 1", field="links.layers")


class NetworkFlow:
    """One running transfer: `left` bytes at the last change of rates, `rate` bytes/s since then."""

    __slots__ = ("ends", "left", "name", "rate", "source", "target")

    def __init__(self, name: str, source: str, target: str, size: float) -> None:
        self.name, self.source, self.target = name, source, target
        self.left = float(size)
        self.rate = 0.0
        self.ends = math.inf


class Network:
    """Flows by name. After a start, cancel or end, call `next_end` again, since every rate may have changed."""

    def __init__(self, settings: LinkSettings, port_gb_s: Callable[[str], float] | None = None) -> None:
        """`port_gb_s`: bandwidth of an instance's port, if ports differ."""
        self.settings = settings
        self._port_gb_s = port_gb_s
        self._flows: dict[str, NetworkFlow] = {}
        self._at = 0.0
        self.moved_bytes = 0.0

    def __len__(self) -> int:
        return len(self._flows)

    def start(self, name: str, source: str, target: str, size: float, now: float) -> None:
        self._advance(now)
        self._flows[name] = NetworkFlow(name, source, target, size)
        self._share(now)

    def cancel(self, name: str, now: float) -> bool:
        """False if there is no such flow."""
        self._advance(now)
        gone = self._flows.pop(name, None)
        self._share(now)
        return gone is not None

    def touching(self, instance_id: str) -> list[str]:
        return [flow.name for flow in self._flows.values() if instance_id in (flow.source, flow.target)]

    @property
    def next_end(self) -> float:
        """When the next flow has sent its last byte; infinite if there are none."""
        return min((flow.ends for flow in self._flows.values()), default=math.inf)

    def ended(self, now: float) -> list[str]:
        """Remove and return the flows that have sent their last byte."""
        done = [flow.name for flow in self._flows.values() if flow.ends <= now]
        self._advance(now)
        for name in done:
            self.moved_bytes += self._flows.pop(name).left
        self._share(now)
        return done

    def _advance(self, now: float) -> None:
        passed, self._at = now - self._at, now
        for flow in self._flows.values():
            sent = min(flow.left, flow.rate * passed)
            flow.left -= sent
            self.moved_bytes += sent

    def _share(self, now: float) -> None:
        """Compute new rates. A predicted end whose rate has not changed is kept as it was."""
        counts = Counter(key for flow in self._flows.values() for key in self._shared(flow))
        for flow in self._flows.values():
            rate = min(self._width(key) / counts[key] for key in self._shared(flow))
            if rate != flow.rate:
                flow.rate = rate
                flow.ends = now + flow.left / rate

    def _width(self, shared: tuple[str, ...]) -> float:
        """Bytes/s of what `_shared` names; for two ports the smaller one."""
        if self._port_gb_s is None:
            return self.settings.bandwidth_gb_s * GIGA
        ends = [name for name in shared if name not in SIDES]
        return min(map(self._port_gb_s, ends), default=self.settings.bandwidth_gb_s) * GIGA

    def _shared(self, flow: NetworkFlow) -> tuple[tuple[str, ...], ...]:
        if self.settings.scope == "port":
            return ((OUT, flow.source), (IN, flow.target))
        return ((flow.source, flow.target),) if self.settings.scope == "pair" else ((FABRIC,),)
