"""The serving code on virtual time: dispatcher, engine scheduler and policies over fitted latency profiles.

The simulator owns time, arrivals and what a device costs; every decision is a call into the objects that serve. Start
with `simulation.py`.
"""

from controller.simulator.demand import Demand
from controller.simulator.links import LinkFailure, LinkSettings
from controller.simulator.results import SimulationResult
from controller.simulator.settings import ElasticSettings, Failure, InstanceSettings, SimulationSettings
from controller.simulator.simulation import Simulation

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
