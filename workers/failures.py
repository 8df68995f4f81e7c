"""Periodic tasks that fail repeatedly, for /healthz: Redis holds how often each has failed in a row.

A heartbeat shows that tasks run, but not that they succeed: a reconciler that raises every time has a heartbeat too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import redis

from controller.core.messages import FAILING_KEY
from workers.live import LiveUnavailable
from workers.tasks.heartbeat import redis_client
from workers.tasks.names import ACTIONS, EXPERIMENTS, LINKS, RECONCILE, SCALE

EACH_SECOND = (RECONCILE, SCALE, ACTIONS, LINKS, EXPERIMENTS)
KEPT_S = 60  # after that long without a run, the missing heartbeat reports the failure
IN_A_ROW = 3  # fewer do not count, since the next run does what a failed one left undone


def task_failed(task: str, error: BaseException | None) -> None:
    """Count a failure. One that Redis does not receive is harmless, since the task runs again a second later."""
    if task not in EACH_SECOND:
        return
    key = FAILING_KEY.format(task=task)
    try:
        with redis_client().pipeline() as pipe:
            pipe.hincrby(key, "count", 1)
            pipe.hset(key, "error", type(error).__name__)  # without its text, which may contain secrets
            pipe.expire(key, KEPT_S)
            pipe.execute()
    except redis.RedisError:
        return


def task_done(task: str) -> None:
    if task not in EACH_SECOND:
        return
    try:
        redis_client().delete(FAILING_KEY.format(task=task))
    except redis.RedisError:
        return


def read_failing() -> list[Mapping[bytes, bytes]]:
    """The count and last error of each task of EACH_SECOND. Raises LiveUnavailable."""
    try:
        with redis_client().pipeline(transaction=False) as pipe:
            for task in EACH_SECOND:
                pipe.hgetall(FAILING_KEY.format(task=task))
            found: list[Any] = pipe.execute()
    except (redis.RedisError, OSError) as error:
        raise LiveUnavailable(f"Redis is unavailable: {error}") from error
    return found


def failing_in_words(kept: Sequence[Mapping[bytes, bytes]]) -> str:
    """The failing tasks of EACH_SECOND in words; "" if none fails. `kept`: what `read_failing` returned."""
    found = {task: each for task, each in zip(EACH_SECOND, kept, strict=True) if int(each.get(b"count", 0)) >= IN_A_ROW}
    return ", ".join(
        f"{task} failed {int(each[b'count'])} times in a row ({each.get(b'error', b'').decode()})"
        for task, each in found.items()
    )
