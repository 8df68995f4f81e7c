"""Provisioners: engines that `make up` starts on this machine, and registered endpoints. What each can do is declared
in `controller.scale.provisioning`."""

from workers.provisioners.base import PROVISIONERS, Observed, Provisioner
from workers.provisioners.looks import Look, Looks
from workers.provisioners.process import ProcessProvisioner
from workers.provisioners.static import Endpoint, StaticProvisioner, Watch

__all__ = [
    "PROVISIONERS",
    "Endpoint",
    "Look",
    "Looks",
    "Observed",
    "ProcessProvisioner",
    "Provisioner",
    "StaticProvisioner",
    "Watch",
]
