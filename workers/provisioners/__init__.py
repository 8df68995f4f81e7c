"""Provisioners: engines that `make up` starts on this machine, jobs of Ray clusters, and registered endpoints. What
each can do is declared in `controller.scale.provisioning`."""

from workers.provisioners.base import PROVISIONERS, Observed, Provisioner, sources
from workers.provisioners.observer import Observation, Observer
from workers.provisioners.process import ProcessProvisioner
from workers.provisioners.ray import RayProvisioner
from workers.provisioners.static import Endpoint, StaticProvisioner, Watch

__all__ = [
    "PROVISIONERS",
    "Endpoint",
    "Observation",
    "Observed",
    "Observer",
    "ProcessProvisioner",
    "Provisioner",
    "RayProvisioner",
    "StaticProvisioner",
    "Watch",
    "sources",
]
