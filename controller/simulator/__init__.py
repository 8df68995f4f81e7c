"""The serving code on virtual time: dispatcher, engine scheduler and policies over fitted latency profiles.

The simulator owns time, arrivals and what a device costs; every decision is a call into the objects that serve. Start
with `simulation.py`.
"""

from controller.simulator.fleet.network import LinkFailure, LinkSettings
from controller.simulator.report.results import SimulationResult
from controller.simulator.settings import ElasticSettings, Failure, InstanceSettings, SimulationSettings
from controller.simulator.simulation import Simulation
from controller.simulator.workloads.demand import Demand

__all__ = [
    "Demand",
    "ElasticSettings",
    "Failure",
    "InstanceSettings",
    "LinkFailure",
    "LinkSettings",
    "Simulation",
    "SimulationResult",
    "SimulationSettings",
]
