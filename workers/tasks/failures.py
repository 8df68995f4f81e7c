"""Periodic tasks and scaling policies that fail repeatedly, for /healthz: Redis holds how often in a row each failed.

A heartbeat shows that tasks run, but not that they succeed: a reconciler that raises every time has a heartbeat too.
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


def read_failing_policies() -> FailingPolicies:
    """Raises LiveUnavailable."""
    try:
        return failing_policies(redis_client().get(FAILING_POLICIES_KEY))
    except (redis.RedisError, OSError) as error:
        raise LiveUnavailable(f"Redis is unavailable: {error}") from error


def failing_policies(raw: Any) -> FailingPolicies:
    return orjson.loads(raw) if raw else {}


def write_failing_policies(failing: FailingPolicies) -> None:
    """Replaces the whole set at each tick of the scaler: a policy that works again is no longer in it."""
    try:
        if failing:
            redis_client().set(FAILING_POLICIES_KEY, orjson.dumps(failing), ex=KEPT_S)
        else:
            redis_client().delete(FAILING_POLICIES_KEY)
    except (redis.RedisError, OSError):
        return


def failed_again(before: FailingPolicy | None, name: str, error: BaseException) -> FailingPolicy:
    return FailingPolicy(name=name, count=1 + (before["count"] if before else 0), error=type(error).__name__)


def failing_in_words(kept: Sequence[Mapping[bytes, bytes]], policies: FailingPolicies | None = None) -> str:
    """The failing tasks of EACH_SECOND and the failing scaling policies in words; "" if none fails.

    `kept`: what `read_failing` returned.
    """
    tasks = [
        (task, int(each.get(b"count", 0)), each.get(b"error", b"").decode())
        for task, each in zip(EACH_SECOND, kept, strict=True)
    ]
    scaling = [(f"scaling policy {each['name']}", each["count"], each["error"]) for each in (policies or {}).values()]
    failing = [each for each in (*tasks, *scaling) if each[1] >= IN_A_ROW]
    return ", ".join(f"{what} failed {count} times in a row ({error})" for what, count, error in failing)
