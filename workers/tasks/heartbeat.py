"""Signs of life of workers and beat, for /healthz: keys in Redis that expire.

The worker of the short queues shows by a task that its tasks run. That of `analysis` is busy for minutes with one
experiment: there the process that takes tasks from the queue says it, whatever its child is at.
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
    sign_of_life("worker")


def sign_of_life(process: str) -> None:
    """Losing one is harmless: the next comes in two seconds, and while Redis is away nobody could read it."""
    try:
        redis_client().set(HEARTBEAT_KEY.format(process=process), time.time(), ex=TTL_S)
    except redis.RedisError:
        return


class AnalysisLives(bootsteps.StartStopStep):
    """A part of the consumer of a worker that serves `analysis`: stops and starts with its connection to the broker."""

    requires = ("celery.worker.consumer.tasks:Tasks",)

    def __init__(self, parent: Any, **kwargs: Any) -> None:
        super().__init__(parent, **kwargs)
        self._timer: Any = None

    def start(self, parent: Any) -> None:
        if ANALYSIS in parent.app.amqp.queues.consume_from:
            sign_of_life(ANALYSIS)
            self._timer = parent.timer.call_repeatedly(EVERY_S, sign_of_life, (ANALYSIS,))

    def stop(self, parent: Any) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


@cache
def redis_client() -> redis.Redis:
    return redis.Redis.from_url(
        settings.REDIS_URL, socket_timeout=REDIS_TIMEOUT_S, socket_connect_timeout=REDIS_TIMEOUT_S
    )
