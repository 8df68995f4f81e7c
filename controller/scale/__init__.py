"""How many instances run, and which: everything about the size of the fleet that can be decided without I/O.

`scaler` decides how many a stage needs (HyperFlexis sec. 6, Alg. 3), `capacity_plan` which ones come and go,
`lifecycle` what to do about each instance that should run, `weight_sources` where its weights come from.
"""

from controller.scale.config import ScalingConfig
from controller.scale.load import FleetObservation, Member, load_metric, processing_rate
from controller.scale.scaler import Drain, ScaleAction, ScaleOut, Scaler, ScalerMemory, Undrain

__all__ = [
    "Drain",
    "FleetObservation",
    "Member",
    "ScaleAction",
    "ScaleOut",
    "Scaler",
    "ScalerMemory",
    "ScalingConfig",
    "Undrain",
    "load_metric",
    "processing_rate",
]
