"""How many instances: the threshold scaler (HyperFlexis sec. 6, Alg. 3), without I/O. State in, state out."""

from controller.scale.config import ScalingConfig
from controller.scale.load import FleetObservation, Member, load_metric, processing_rate
from controller.scale.scaler import Drain, ScaleAction, ScaleOut, Scaler, ScalerState, Undrain

__all__ = [
    "Drain",
    "FleetObservation",
    "Member",
    "ScaleAction",
    "ScaleOut",
    "Scaler",
    "ScalerState",
    "ScalingConfig",
    "Undrain",
    "load_metric",
    "processing_rate",
]
