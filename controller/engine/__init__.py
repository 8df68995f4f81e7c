"""An engine's scheduler and KV blocks, without tensors, sockets or clocks."""

from controller.engine.blocks import BlockError, BlockManager
from controller.engine.config import EngineConfig
from controller.engine.errors import ProtocolError
from controller.engine.preemptive import PreemptivePrefill
from controller.engine.scheduler import EngineScheduler
from controller.engine.seats import Totals
from controller.engine.tasks import PreemptionConfig

__all__ = [
    "BlockError",
    "BlockManager",
    "EngineConfig",
    "EngineScheduler",
    "PreemptionConfig",
    "PreemptivePrefill",
    "ProtocolError",
    "Totals",
]
