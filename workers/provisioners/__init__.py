"""Provisioners: `process` (reference engines that `make up` starts on this machine), `static` (registered
endpoints)."""

from workers.provisioners.base import PROVISIONERS, Observed, Provisioner
from workers.provisioners.process import ProcessProvisioner
from workers.provisioners.static import Endpoint, StaticProvisioner, Watch

__all__ = ["PROVISIONERS", "Endpoint", "Observed", "ProcessProvisioner", "Provisioner", "StaticProvisioner", "Watch"]
