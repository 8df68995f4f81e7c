"""Instances that fail at times given in the settings, with all their requests, and their replacements."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Protocol

from controller.core import events as ev
from controller.core.types import Role
from controller.simulator.fleet.cluster import Cluster
from controller.simulator.fleet.disaggregation import KvTransfers
from controller.simulator.heap import EventHeap, EventKind
from controller.simulator.settings import Failure, SimulationSettings
from controller.simulator.trip import Trip


class FailingRun(Protocol):
    """What a simulation lends to its failures."""

    settings: SimulationSettings
    cluster: Cluster
    heap: EventHeap
    kv: KvTransfers | None

    def at_engine(self, instance_id: str) -> Sequence[Trip]: ...

    def lost(self, trip: Trip) -> None: ...

    def tell(self, *events: ev.Event) -> None: ...

    def bring_up_later(self, name: str, at: float) -> None: ...


class Failures:
    def __init__(self, host: FailingRun) -> None:
        self._host = host

    def start(self) -> None:
        for failure in self._host.settings.failures:
            self._host.heap.push(failure.at, EventKind.FAILURE, partial(self._die, failure))

    def _die(self, failure: Failure) -> None:
        host, now = self._host, self._host.heap.now
        instance = host.cluster.in_slot(failure.instance)
        if instance is None:
            return
        host.tell(ev.InstanceDown(instance.id))
        for trip in host.at_engine(instance.id):
            host.lost(trip)
        if host.kv is not None:
            host.kv.died(instance)
        host.cluster.remove(instance, now)
        if failure.for_s is not None:
            if instance.spec.role is not Role.DECODE:  # as in production, new requests wait for the replacement
                host.tell(ev.Expected(instance.spec.model, now))
            host.bring_up_later(host.cluster.ask(failure.instance, now + failure.for_s), now + failure.for_s)
