"""Heartbeats of workers and beat, for /healthz: keys in Redis that expire.

The worker of the short queues sends its heartbeat from a task, which shows that its tasks run. The worker of `analysis`
computes one experiment for minutes, so there the consumer process sends it while its child computes.
"""

from __future__ import annotations

import time
from functools import cache
from typing import Any

import redis
from celery import bootsteps, shared_task
from django.conf import settings

from controller.core.messages import HEARTBEAT_KEY
from workers.tasks.names import HEARTBEAT

TTL_S = 30
EVERY_S = 2.0
ANALYSIS = "analysis"
REDIS_TIMEOUT_S = 1.0


@shared_task(name=HEARTBEAT, soft_time_limit=4, time_limit=5)
def heartbeat() -> None:
    heartbeat_send("worker")


def heartbeat_send(process: str) -> None:
    """Store the heartbeat of a process. Never raises: the next one follows two seconds later, and without Redis it
    could not be read anyway."""
    try:
        redis_client().set(HEARTBEAT_KEY.format(process=process), time.time(), ex=TTL_S)
    except redis.RedisError:
        return


class AnalysisHeartbeat(bootsteps.StartStopStep):
    """A step of Celery's consumer that sends the heartbeat of a worker that serves `analysis`, while it is connected to
    the broker."""

    requires = ("celery.worker.consumer.tasks:Tasks",)

    def __init__(self, parent: Any, **kwargs: Any) -> None:
        super().__init__(parent, **kwargs)
        self._timer: Any = None

    def start(self, parent: Any) -> None:
        if ANALYSIS in parent.app.amqp.queues.consume_from:
            heartbeat_send(ANALYSIS)
            self._timer = parent.timer.call_repeatedly(EVERY_S, heartbeat_send, (ANALYSIS,))

    def stop(self, parent: Any) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


@cache
def redis_client() -> redis.Redis:
    return redis.Redis.from_url(
        settings.REDIS_URL, socket_timeout=REDIS_TIMEOUT_S, socket_connect_timeout=REDIS_TIMEOUT_S
    )
