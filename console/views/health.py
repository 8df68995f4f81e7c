"""GET /healthz: 200 once every component is ready, 503 before and while one is away, with the state of each.

Every check has its own short time-out and is cancelled when it runs out, so a PostgreSQL or Redis that hangs costs this
page two seconds and no thread. Read by `make up`, by load balancers, and by people: no login, and nothing secret in it.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any

import aiohttp
import psycopg
from django.conf import settings
from django.http import HttpRequest, JsonResponse
from redis.asyncio import Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff

from controller.core.messages import HEARTBEAT_KEY

CHECK_TIMEOUT_S = 2.0
HEARTBEAT_OLD_S = 10.0  # one comes each 2 s; five lost are an outage
PROCESSES = ("worker", "analysis", "beat")
ENGINES = """
SELECT count(*) FILTER (WHERE desired_state = 'running' AND observed_state = 'ready' AND weights = 'present'),
       count(*) FILTER (WHERE desired_state = 'running' AND weights <> 'absent'),
       (SELECT coalesce(sum(min_instances), 0) FROM scaling_policy WHERE enabled)
FROM instance
"""

Component = dict[str, Any]


async def healthz(request: HttpRequest) -> JsonResponse:
    postgres, redis, gateway = await asyncio.gather(
        _bounded(check_postgres), _bounded(check_redis), _bounded(check_gateway)
    )
    components = {
        "postgres": {"state": postgres["state"], "detail": postgres.get("detail", "")},
        "redis": {"state": redis["state"], "detail": redis.get("detail", "")},
        "gateway": {"state": gateway["state"], "detail": gateway.get("detail", "")},
        **{name: heartbeat_state(redis, name) for name in PROCESSES},
        "engines": engines_state(postgres, gateway),
    }
    ok = all(component["state"] == "ok" for component in components.values())
    body = {"status": "ok" if ok else "unavailable", "components": components}
    response = JsonResponse(body, status=200 if ok else 503)
    response["Cache-Control"] = "no-store"
    response._has_been_logged = True  # asked twice a second during a start: not an error each time
    return response


async def check_postgres() -> Component:
    """A connection of its own: the pool's may be the ones that hang."""
    database = settings.DATABASES["default"]
    connection = await psycopg.AsyncConnection.connect(
        host=database["HOST"] or None,
        port=database["PORT"] or None,
        user=database["USER"] or None,
        password=database["PASSWORD"] or None,
        dbname=database["NAME"],
        autocommit=True,
        connect_timeout=int(CHECK_TIMEOUT_S),
    )
    async with connection:
        row = await (await connection.execute(ENGINES)).fetchone()
    ready, total, least = row or (0, 0, 0)
    return {"state": "ok", "engines": (int(ready), int(total), int(least))}


async def check_redis() -> Component:
    client = Redis.from_url(
        settings.REDIS_URL,
        retry=Retry(NoBackoff(), 0),
        socket_timeout=CHECK_TIMEOUT_S,
        socket_connect_timeout=CHECK_TIMEOUT_S,
    )
    try:
        seen = await client.mget([HEARTBEAT_KEY.format(process=name) for name in PROCESSES])
    finally:
        await client.aclose()
    return {"state": "ok", **dict(zip(PROCESSES, seen, strict=True))}


async def check_gateway() -> Component:
    timeout = aiohttp.ClientTimeout(total=CHECK_TIMEOUT_S)
    async with (
        aiohttp.ClientSession(timeout=timeout) as session,
        session.get(f"{settings.GATEWAY_URL}/healthz") as answer,
    ):
        body = await answer.json()
    if answer.status != 200:
        return {"state": "down", "detail": f"answers {answer.status}"}
    serving = sum(state == "up" for state in body["instances"].values())
    return {"state": "ok", "serving": serving}


def heartbeat_state(redis: Component, process: str) -> Component:
    if redis["state"] != "ok":
        return {"state": "unknown", "detail": "Redis is away"}
    raw = redis[process]
    if raw is None:
        return {"state": "down", "detail": "no sign of life"}
    age_s = round(max(0.0, time.time() - float(raw)), 1)
    old = age_s > HEARTBEAT_OLD_S
    return {"state": "down" if old else "ok", "age_s": age_s, "detail": f"last seen {age_s} s ago" if old else ""}


def engines_state(postgres: Component, gateway: Component) -> Component:
    """Ready: those the gateway can send to. Enough: as many as the scaling policies' lower bounds, at least one.

    Not all that are wanted: an instance that the scaler has just asked for must not turn a serving fleet unready.
    """
    if postgres["state"] != "ok" or gateway["state"] != "ok":
        return {"state": "unknown", "detail": "PostgreSQL or gateway is away"}
    ready, total, least = postgres["engines"]
    ready = min(ready, gateway["serving"])
    needed = max(1, least)
    return {
        "state": "ok" if ready >= needed else "down",
        "ready": ready,
        "total": total,
        "detail": "" if ready >= needed else f"{ready} of {max(total, needed)} ready",
    }


async def _bounded(check: Callable[[], Awaitable[Component]]) -> Component:
    try:
        async with asyncio.timeout(CHECK_TIMEOUT_S):
            return await check()
    except TimeoutError:
        return {"state": "down", "detail": f"no answer within {CHECK_TIMEOUT_S:g} s"}
    except Exception as error:  # whatever a broken component raises: its name is the answer
        return {"state": "down", "detail": type(error).__name__}
