"""Runs the serving code on virtual time: dispatcher, engine scheduler and policies over fitted latency profiles.

The simulator provides time, arrivals and the cost of device work. Every decision is a call into the objects that serve.
Start reading with `simulation.py`.
"""

from controller.simulator.network import LinkFailure, LinkSettings
from controller.simulator.report.results import RunResult
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
    "RunResult",
    "Simulation",
    "SimulationSettings",
]
