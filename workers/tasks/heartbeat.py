"""Signs of life of worker and beat, for /healthz: keys in Redis that expire."""

from __future__ import annotations

import time
from functools import cache

import redis
from celery import shared_task
from django.conf import settings

from controller.core.messages import HEARTBEAT_KEY
from workers.tasks.names import HEARTBEAT

TTL_S = 30
REDIS_TIMEOUT_S = 1.0


@shared_task(name=HEARTBEAT, soft_time_limit=4, time_limit=5)
def heartbeat() -> None:
    sign_of_life("worker")


def sign_of_life(process: str) -> None:
    """Losing one is harmless: the next comes in two seconds, and while Redis is away nobody could read it."""
    try:
        _redis().set(HEARTBEAT_KEY.format(process=process), time.time(), ex=TTL_S)
    except redis.RedisError:
        return


@cache
def _redis() -> redis.Redis:
    return redis.Redis.from_url(
        settings.REDIS_URL, socket_timeout=REDIS_TIMEOUT_S, socket_connect_timeout=REDIS_TIMEOUT_S
    )
