"""Scheduling, pure: the scheduler over dispatcher and migrator, and the policy sets to build one from."""

from controller.dispatch.disaggregation.migrator import Migrator
from controller.dispatch.disaggregation.migrator_config import MigratorConfig
from controller.dispatch.disaggregation.placements import MIGRATIONS
from controller.dispatch.dispatcher import DispatchConfig, StageDispatcher
from controller.dispatch.policy_sets import (
    DEFAULT_POLICY_SET,
    POLICY_SETS,
    PolicySet,
    build_dispatcher,
    build_migrator,
    build_scheduler,
)
from controller.dispatch.queue import QueueView
from controller.dispatch.scheduler import Scheduler

__all__ = [
    "DEFAULT_POLICY_SET",
    "MIGRATIONS",
    "POLICY_SETS",
    "DispatchConfig",
    "Migrator",
    "MigratorConfig",
    "PolicySet",
    "QueueView",
    "Scheduler",
    "StageDispatcher",
    "build_dispatcher",
    "build_migrator",
    "build_scheduler",
]
