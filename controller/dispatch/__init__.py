"""The dispatcher: queue, shadow state of the instances, pacing, and the policy sets to build one from."""

from controller.dispatch.config import DispatchConfig
from controller.dispatch.dispatcher import StageDispatcher
from controller.dispatch.migrator import Migrator
from controller.dispatch.placements import MIGRATIONS
from controller.dispatch.policy_sets import (
    DEFAULT_POLICY_SET,
    POLICY_SETS,
    PolicySet,
    build_dispatcher,
    build_migrator,
)
from controller.dispatch.queue import QueueView
from controller.dispatch.transfers import MigratorConfig

__all__ = [
    "DEFAULT_POLICY_SET",
    "MIGRATIONS",
    "POLICY_SETS",
    "DispatchConfig",
    "Migrator",
    "MigratorConfig",
    "PolicySet",
    "QueueView",
    "StageDispatcher",
    "build_dispatcher",
    "build_migrator",
]
