"""Names of Celery tasks, for the schedule and the tasks, which do not import each other."""

from __future__ import annotations

SCALE = "scaling.tick"
ACTIONS = "actions.work"
LINKS = "links.look"
FLOWS = "flows.publish"
RECONCILE = "instances.reconcile"
HEARTBEAT = "processes.heartbeat"
PARTITIONS = "records.partitions"
RETENTION = "records.retention"
EXPERIMENTS = "experiments.work"
EXPERIMENTS_RETAIN = "experiments.retain"
LENGTHS = "lengths.train"
GRAPHS = "graphs.train"
PRUNING = "pruning.coordinate"
PRUNING_PROCESS = "pruning"  # whose heartbeat says that the coordinator runs
TASK_MODULES = (
    "workers.tasks.scaling",
    "workers.tasks.reconcile",
    "workers.tasks.actions",
    "workers.tasks.links",
    "workers.tasks.flows",
    "workers.tasks.heartbeat",
    "workers.tasks.records",
    "workers.tasks.experiments",
    "workers.tasks.lengths",
    "workers.tasks.graphs",
    "workers.tasks.pruning",
)
