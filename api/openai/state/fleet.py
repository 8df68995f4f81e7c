"""The gateway's instances: backends by id, which of them answer, and what the scheduler is told of them.

The configuration says which instances exist; only an answer to telemetry makes one usable. A refused connection takes
it down at once, silence (no telemetry and no token) after `DEAD_AFTER_S`. An instance that leaves the configuration
gets no new requests and is dropped when its last one has ended.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import aiohttp

from controller.core import events as ev
from controller.core.snapshot import GatewaySnapshot
from controller.core.types import InstanceSpec, Load, Role
from controller.dispatch.expected import ExpectedInstances
from controller.scale.provisioning import abilities
from workers.backends.base import Backend, EngineError, Limits
from workers.backends.registry import backend_for

log = logging.getLogger(__name__)

DEAD_AFTER_S = 10.0  # a busy engine may answer telemetry late; its tokens count as signs of life too
REPLACED_WITHIN_S = 10.0  # far more than it takes until gateways know that a process has ended


class InstanceListener(Protocol):
    """The part of Runtime that is told of instances."""

    def push(self, event: ev.Event) -> None: ...

    def instance_down(self, instance_id: str, why: str, *, died: bool = False) -> None: ...

    def serving(self, instance_id: str) -> int: ...


class Seat:
    """One configured instance. Times are monotonic seconds."""

    __slots__ = ("awaited_until", "backend", "draining", "leaving", "seen_at", "spec", "up")

    def __init__(self, spec: InstanceSpec, backend: Backend, now: float) -> None:
        self.spec = spec
        self.backend = backend
        self.up = False
        self.draining = False
        self.leaving = False
        self.seen_at = now
        self.awaited_until = now + REPLACED_WITHIN_S  # while down: until then it or its replacement is expected

    @property
    def replaceable(self) -> bool:
        """Whether another one is started when it ends: not for a registered server, which its owner runs."""
        return abilities(self.spec.labels.get("provisioner", "")).starts

    def awaited(self, now: float) -> bool:
        stays = not self.draining and not self.leaving and self.spec.role is not Role.DECODE
        return stays and not self.up and now < self.awaited_until


class GatewayFleet:
    def __init__(self, session: aiohttp.ClientSession, limits: Limits, clock: Callable[[], float]) -> None:
        self.seats: dict[str, Seat] = {}
        self.backends: dict[str, Backend] = {}
        self._session = session
        self._limits = limits
        self._clock = clock
        self._runtime: InstanceListener | None = None
        self._coming: list[tuple[str, float]] = []  # model, earliest time
        self._likely: list[tuple[str, float]] = []  # model and likely time of those of which it is known
        self._on_demand: tuple[str, ...] = ()
        self._expected = ExpectedInstances()
        self.learned: Callable[[InstanceSpec], Mapping[str, Any] | None] = lambda spec: None  # by an earlier process

    @property
    def runtime(self) -> InstanceListener:
        if self._runtime is None:
            raise RuntimeError("the fleet was used before a runtime was bound to it")
        return self._runtime

    @property
    def coming(self) -> frozenset[str]:
        """Models with an instance being started, as the scheduler was told."""
        return self._expected.models

    @property
    def on_demand(self) -> frozenset[str]:
        """Models of which no instance is being started, but will be once a request waits for it."""
        return self._expected.on_demand

    def bind(self, runtime: InstanceListener) -> None:
        self._runtime = runtime

    def apply(self, snapshot: GatewaySnapshot) -> None:
        """Level-triggered: whatever the seats were before, now they are those of the snapshot."""
        wanted = {spec.id: spec for spec in snapshot.instances}
        for spec in wanted.values():
            self._seat(spec)
        for instance_id, seat in list(self.seats.items()):
            if instance_id not in wanted and not seat.leaving:
                seat.leaving = True
                self._drain(seat)
        for instance_id in wanted:
            self._set_draining(self.seats[instance_id], instance_id in snapshot.draining)
        now, wall = self._clock(), time.time()
        self._coming = [(coming.model, now + max(0.0, coming.not_before - wall)) for coming in snapshot.coming]
        self._likely = [(each.model, now + each.serves_at - wall) for each in snapshot.coming if each.serves_at > 0]
        self._on_demand = snapshot.on_demand
        self.sweep()

    def sweep(self) -> None:
        """Drop instances that left the configuration and are idle; stop expecting those that did not come."""
        for instance_id, seat in list(self.seats.items()):
            if seat.leaving and not self.runtime.serving(instance_id):
                self._drop(instance_id)
        self._expect()

    def _expect(self) -> None:
        """Tell the scheduler when the next instance of a model is expected, where that changed."""
        now = self._clock()
        awaited = [(seat.spec.model, seat.seen_at) for seat in self.seats.values() if seat.awaited(now)]
        for event in self._expected.changes([*self._coming, *awaited], self._on_demand, self._likely):
            self.runtime.push(event)

    def _seat(self, spec: InstanceSpec) -> None:
        seat = self.seats.get(spec.id)
        if seat is not None and (seat.spec.url, seat.spec.backend) != (spec.url, spec.backend):
            self._drop(spec.id)  # another process under the same id: requests at the old one cannot go on
            seat = None
        if seat is None:
            backend = backend_for(spec, self._session, self._limits)
            self.seats[spec.id] = Seat(spec, backend, self._clock())
            self.backends[spec.id] = backend
            return
        changed = seat.spec != spec
        seat.spec = seat.backend.spec = spec
        if seat.leaving:
            seat.leaving = False
            changed = True
        if changed and seat.up:
            self._announce(seat)

    def _set_draining(self, seat: Seat, draining: bool) -> None:
        if draining == seat.draining:
            return
        seat.draining = draining
        if draining:
            self._drain(seat)
        elif seat.up:
            self._announce(seat)

    def _announce(self, seat: Seat) -> None:
        """Announce it as up with this specification (role included); a draining one stays so."""
        self.runtime.push(ev.InstanceUp(seat.spec, seat.backend.capabilities.paired, self.learned(seat.spec)))
        if seat.draining or seat.leaving:
            self._drain(seat)

    def _drain(self, seat: Seat) -> None:
        if seat.up:
            self.runtime.push(ev.InstanceDraining(seat.spec.id))

    def _drop(self, instance_id: str) -> None:
        seat = self.seats.pop(instance_id)
        del self.backends[instance_id]
        if seat.up:
            self.runtime.instance_down(instance_id, "it left the configuration")

    # ---- health ---------------------------------------------------------------------------------------------------

    def reported(self, instance_id: str, load: Load) -> None:
        """Telemetry came, so the instance is alive."""
        seat = self.seats.get(instance_id)
        if seat is None:
            return
        seat.seen_at = max(seat.seen_at, load.observed_at)
        if not seat.up:
            log.info("instance %s is up", instance_id)
            seat.up = True
            self._announce(seat)
            self._expect()
        self.runtime.push(ev.Telemetry(instance_id, load))

    def silent(self, instance_id: str, error: EngineError) -> None:
        """Telemetry did not come."""
        seat = self.seats.get(instance_id)
        if seat is None:
            return
        if not seat.up:
            # A registered server that does not answer is not on its way: nobody starts it.
            if not seat.replaceable and seat.awaited_until > -math.inf:
                seat.awaited_until = -math.inf
                self._expect()
            return
        if error.unreachable or self._clock() - seat.seen_at > DEAD_AFTER_S:
            log.warning("instance %s is down: %s", instance_id, error)
            seat.up = False
            ended = error.unreachable and seat.replaceable
            seat.awaited_until = self._clock() + REPLACED_WITHIN_S if ended else -math.inf
            self.runtime.instance_down(instance_id, str(error), died=error.unreachable and not seat.leaving)
            self._expect()

    def heard(self, instance_id: str, now: float) -> None:
        """A token came, so it is alive however slow its telemetry."""
        seat = self.seats.get(instance_id)
        if seat is not None:
            seat.seen_at = now
