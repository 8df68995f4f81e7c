"""Tasks of the schedule, and scaling policies, that fail again and again, for /healthz: how often in a row, in Redis.

A heartbeat says that tasks run, and not that they come to their end: a reconciler that raises at each look lives too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import orjson
import redis

from controller.core.messages import FAILING_KEY, FAILING_POLICIES_KEY, FailingPolicies, FailingPolicy
from workers.live import LiveUnavailable
from workers.tasks.heartbeat import redis_client
from workers.tasks.names import ACTIONS, EXPERIMENTS, LINKS, RECONCILE, SCALE

EACH_SECOND = (RECONCILE, SCALE, ACTIONS, LINKS, EXPERIMENTS)
KEPT_S = 60  # then nobody runs them any more, which the heartbeat says
IN_A_ROW = 3  # fewer are a hiccup: the next look does what this one left


def task_failed(task: str, error: BaseException | None) -> None:
    """Losing one is harmless: the next comes in a second."""
    if task not in EACH_SECOND:
        return
    key = FAILING_KEY.format(task=task)
    try:
        with redis_client().pipeline() as pipe:
            pipe.hincrby(key, "count", 1)
            pipe.hset(key, "error", type(error).__name__)  # its text may hold what not everybody may read
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
    """What is kept of each task of EACH_SECOND. Raises LiveUnavailable."""
    try:
        with redis_client().pipeline(transaction=False) as pipe:
            for task in EACH_SECOND:
                pipe.hgetall(FAILING_KEY.format(task=task))
            found: list[Any] = pipe.execute()
    except (redis.RedisError, OSError) as error:
        raise LiveUnavailable(f"Redis is away: {error}") from error
    return found


def read_failing_policies() -> FailingPolicies:
    """Raises LiveUnavailable."""
    try:
        return failing_policies(redis_client().get(FAILING_POLICIES_KEY))
    except (redis.RedisError, OSError) as error:
        raise LiveUnavailable(f"Redis is away: {error}") from error


def failing_policies(raw: Any) -> FailingPolicies:
    return orjson.loads(raw) if raw else {}


def write_failing_policies(failing: FailingPolicies) -> None:
    """The whole set, at each tick of the scaler: what is missing works again, or is not there any more."""
    try:
        if failing:
            redis_client().set(FAILING_POLICIES_KEY, orjson.dumps(failing), ex=KEPT_S)
        else:
            redis_client().delete(FAILING_POLICIES_KEY)
    except (redis.RedisError, OSError):
        return


def failed_again(before: FailingPolicy | None, name: str, error: BaseException) -> FailingPolicy:
    return FailingPolicy(name=name, count=1 + (before["count"] if before else 0), error=type(error).__name__)


def failing_told(kept: Sequence[Mapping[bytes, bytes]], policies: FailingPolicies | None = None) -> str:
    """Which of EACH_SECOND fail, in the order of `kept`, then which scaling policies; "" if none does."""
    tasks = [
        (task, int(each.get(b"count", 0)), each.get(b"error", b"").decode())
        for task, each in zip(EACH_SECOND, kept, strict=True)
    ]
    scaling = [(f"scaling policy {each['name']}", each["count"], each["error"]) for each in (policies or {}).values()]
    failing = [each for each in (*tasks, *scaling) if each[1] >= IN_A_ROW]
    return ", ".join(f"{what} failed {count} times in a row ({error})" for what, count, error in failing)
