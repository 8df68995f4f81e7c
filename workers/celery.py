"""The Celery app: broker settings, queues, time limits and the beat schedule.

Queues: `control` (scaler, reconciler, heartbeat: short tasks, every second), `actions` (actions on instances),
`analysis` (long tasks) and `pruning` (the coordinator). In `make up` one worker serves the first two, another one
serves `analysis`, because an experiment takes minutes and no other task may wait for it, and a third one serves
`pruning`, whose task waits for news of the gateways.
"""

from __future__ import annotations

import os

os.environ.setdefault("DJANGO_SETTINGS_MODULE", "console.settings")
os.environ.setdefault("CELERY_SKIP_CHECKS", "1")  # Django's checks would import all pages into every worker

from celery import Celery, Task
from celery.signals import after_setup_logger, before_task_publish, task_failure, task_success
from django.conf import settings

from workers.tasks.consuming import StalledConsumer
from workers.tasks.failures import task_done, task_failed
from workers.tasks.heartbeat import AnalysisHeartbeat
from workers.tasks.logs import quieten
from workers.tasks.names import (
    ACTIONS,
    EXPERIMENTS,
    EXPERIMENTS_RETAIN,
    FLOWS,
    GRAPHS,
    HEARTBEAT,
    LENGTHS,
    LINKS,
    PARTITIONS,
    PRUNING,
    RECONCILE,
    RETENTION,
    SCALE,
    TASK_MODULES,
)

TICK_S = 1.0
HEARTBEAT_EVERY_S = 2.0
FLOWS_EVERY_S = 5.0
LENGTHS_EVERY_S = 60.0
GRAPHS_EVERY_S = 300.0
HOUR_S = 3600.0

app = Celery("slackline")
app.conf.update(
    broker_url=settings.REDIS_URL,
    broker_connection_retry_on_startup=True,
    broker_connection_max_retries=None,  # reconnect after an outage of any length
    # The worker must not hang when Redis hangs. BRPOP polls once a second, so these timeouts do not interrupt it.
    broker_transport_options={"socket_timeout": 5, "socket_connect_timeout": 3, "health_check_interval": 10},
    imports=TASK_MODULES,
    task_default_queue="control",
    task_routes={
        "actions.*": {"queue": "actions"},
        "links.*": {"queue": "actions"},
        "records.*": {"queue": "analysis"},
        "experiments.*": {"queue": "analysis"},
        "lengths.*": {"queue": "analysis"},
        "graphs.*": {"queue": "analysis"},
        "pruning.*": {"queue": "pruning"},
    },
    task_ignore_result=True,  # results of tasks are in PostgreSQL
    task_acks_late=False,  # else Redis would deliver long tasks twice; the next tick does what a killed worker left
    task_time_limit=10,
    task_soft_time_limit=8,
    task_serializer="json",
    accept_content=["json"],
    worker_prefetch_multiplier=1,
    worker_max_memory_per_child=200_000,  # kB; a larger child process is replaced between two tasks
    worker_send_task_events=False,
    worker_enable_remote_control=False,
    timezone="UTC",
    beat_max_loop_interval=5,
    # Ticks older than two periods are dropped; otherwise the backlog of an outage would run all at once.
    beat_schedule={
        "scale": {"task": SCALE, "schedule": TICK_S, "options": {"expires": 2 * TICK_S}},
        "reconcile": {"task": RECONCILE, "schedule": TICK_S, "options": {"expires": 2 * TICK_S}},
        "actions": {"task": ACTIONS, "schedule": TICK_S, "options": {"expires": 2 * TICK_S}},
        "links": {"task": LINKS, "schedule": TICK_S, "options": {"expires": 2 * TICK_S}},
        "flows": {"task": FLOWS, "schedule": FLOWS_EVERY_S, "options": {"expires": 2 * FLOWS_EVERY_S}},
        "pruning": {"task": PRUNING, "schedule": TICK_S, "options": {"expires": 2 * TICK_S}},
        "heartbeat": {"task": HEARTBEAT, "schedule": HEARTBEAT_EVERY_S, "options": {"expires": 2 * HEARTBEAT_EVERY_S}},
        "partitions": {"task": PARTITIONS, "schedule": HOUR_S, "options": {"expires": HOUR_S}},
        "experiments": {"task": EXPERIMENTS, "schedule": TICK_S, "options": {"expires": 2 * TICK_S}},
        "experiments-retain": {"task": EXPERIMENTS_RETAIN, "schedule": HOUR_S, "options": {"expires": HOUR_S}},
        "lengths": {"task": LENGTHS, "schedule": LENGTHS_EVERY_S, "options": {"expires": LENGTHS_EVERY_S}},
        "graphs": {"task": GRAPHS, "schedule": GRAPHS_EVERY_S, "options": {"expires": GRAPHS_EVERY_S}},
        "retention": {"task": RETENTION, "schedule": HOUR_S, "options": {"expires": HOUR_S}},
    },
)


app.steps["consumer"].update((AnalysisHeartbeat, StalledConsumer))


@after_setup_logger.connect
def _quieten(**kwargs: object) -> None:
    quieten()


@before_task_publish.connect
def _beat_heartbeat(sender: str = "", **kwargs: object) -> None:
    """Runs in the process that publishes a task. Only beat publishes HEARTBEAT, so this is beat's own heartbeat."""
    if sender == HEARTBEAT:
        from workers.tasks.heartbeat import heartbeat_send

        heartbeat_send("beat")


@task_failure.connect
def _failed(sender: Task | None = None, exception: BaseException | None = None, **kwargs: object) -> None:
    if sender is not None:
        task_failed(sender.name, exception)


@task_success.connect
def _done(sender: Task | None = None, **kwargs: object) -> None:
    if sender is not None:
        task_done(sender.name)
