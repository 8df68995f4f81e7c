"""What scaling, failures, presence and monitoring use of the simulation that they belong to."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from controller.core import events as ev
from controller.dispatch import Scheduler
from controller.simulator.fleet.cluster import Cluster
from controller.simulator.fleet.disaggregation import SimulatedTransfers
from controller.simulator.fleet.gateways import GatewayGroup
from controller.simulator.fleet.joins import Joins
from controller.simulator.fleet.links import FleetLinks
from controller.simulator.heap import EventHeap
from controller.simulator.in_flight import SimulatedRequest
from controller.simulator.report.results import RunResult
from controller.simulator.settings import SimulationSettings


class FleetRun(Protocol):
    """A run as seen by what changes or watches its fleet. `kv`: None unless the run is disaggregated."""

    settings: SimulationSettings
    heap: EventHeap
    cluster: Cluster
    scheduler: Scheduler | GatewayGroup
    kv: SimulatedTransfers | None
    joins: Joins
    links: FleetLinks
    result: RunResult

    def tell(self, *events: ev.Event) -> None: ...

    def bring_up(self, name: str) -> None: ...

    def bring_up_later(self, name: str, at: float) -> None: ...

    def at_engine(self, instance_id: str) -> Sequence[SimulatedRequest]: ...

    def lost(self, in_flight: SimulatedRequest, *, down: bool = False) -> None: ...
