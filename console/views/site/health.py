"""GET /healthz: 200 when every component is ready or requests are still served, else 503, with the state of each.

`status` is ok, degraded (fewer instances are ready than wanted, but every model is served) or unavailable; `reason`
names what is not ok.

Every check has a short time-out of its own, so a PostgreSQL or Redis that hangs costs two seconds and no thread. The
state is made at most once a second, whoever asks. Load balancers read the status without a login; the components only
who may read metrics (`workers.http.details`).
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from typing import Any
from weakref import WeakKeyDictionary

import aiohttp
import psycopg
from django.conf import settings
from django.http import HttpRequest, JsonResponse
from redis.asyncio import Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff

from console.proxies import PASSED_ON
from controller.core.messages import FAILING_KEY, FAILING_POLICIES_KEY, HEARTBEAT_KEY
from controller.core.types import Role
from controller.postgres.params import server_params
from workers.http.details import KEPT_S, bearer, may_read
from workers.tasks.failures import EACH_SECOND, failing_in_words, failing_policies

CHECK_TIMEOUT_S = 2.0
CONFIG_OLD_S = 10.0  # a gateway asks twice a second
HEARTBEAT_OLD_S = 10.0  # one comes each 2 s; five lost are an outage
PROCESSES = ("worker", "analysis", "beat")
ENGINES = """
SELECT id, model_id, role, observed_state = 'ready' AND weights = 'present'
FROM instance
WHERE desired_state = 'running' AND weights <> 'absent'
"""
LEAST = """
SELECT scaling_policy.model_id, role, min_instances, name
FROM scaling_policy JOIN served_model ON served_model.id = model_id
WHERE enabled
ORDER BY name, role
"""

Component = dict[str, Any]


class KeptState:
    """Gives the last state again for KEPT_S; callers who come while one is being made wait for it."""

    def __init__(self) -> None:
        self._last: tuple[float, Component] | None = None
        self._making: WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Task[Component]] = WeakKeyDictionary()

    async def get(self) -> Component:
        if self._last is not None and time.monotonic() - self._last[0] < KEPT_S:
            return self._last[1]
        loop = asyncio.get_running_loop()
        making = self._making.get(loop)
        if making is None or making.done():
            making = self._making[loop] = loop.create_task(self._make())
        return await asyncio.shield(making)  # who hangs up must not end it for the others

    async def _make(self) -> Component:
        state = await whole_state()
        self._last = (time.monotonic(), state)
        return state


RECENT = KeptState()


async def healthz(request: HttpRequest) -> JsonResponse:
    state = await RECENT.get()
    body = state if reads_details(request) else {"status": state["status"]}
    response = JsonResponse(body, status=503 if state["status"] == "unavailable" else 200)
    response["Cache-Control"] = "no-store"
    # `make up` polls twice a second: do not log each 503 as an error.
    response._has_been_logged = True  # type: ignore[attr-defined]
    return response


def reads_details(request: HttpRequest) -> bool:
    """Whether this caller may read metrics and components. Headers of proxies are resolved before (`console.proxies`),
    and leave a mark."""
    authorization = request.headers.get("Authorization", "").encode()
    forwarded = PASSED_ON in getattr(request, "scope", {})
    return may_read(settings.METRICS_TOKEN, authorization, request.META.get("REMOTE_ADDR"), forwarded=forwarded)


async def whole_state() -> Component:
    postgres, redis, gateway = await asyncio.gather(
        _bounded(check_postgres), _bounded(check_redis), _bounded(check_gateway)
    )
    components = {
        "postgres": {"state": postgres["state"], "detail": postgres.get("detail", "")},
        "redis": {"state": redis["state"], "detail": redis.get("detail", "")},
        "gateway": {"state": gateway["state"], "detail": gateway.get("detail", "")},
        **{name: heartbeat_state(redis, name) for name in PROCESSES},
        "jobs": jobs_state(redis),
        "engines": engines_state(postgres, gateway),
    }
    status = status_of(components)
    reasons = [
        f"{name}: {each['detail'] or each['state']}" for name, each in components.items() if each["state"] != "ok"
    ]
    return {"status": status, "reason": "; ".join(reasons), "components": components}


def status_of(components: Mapping[str, Component]) -> str:
    states = {component["state"] for component in components.values()}
    return "ok" if states == {"ok"} else "degraded" if states == {"ok", "degraded"} else "unavailable"


async def check_postgres() -> Component:
    """Uses its own connection: those of the pool may be the ones that hang."""
    params = server_params() | {"connect_timeout": int(CHECK_TIMEOUT_S)}
    connection = await psycopg.AsyncConnection.connect(**params, autocommit=True)
    async with connection:
        engines = await (await connection.execute(ENGINES)).fetchall()
        least = await (await connection.execute(LEAST)).fetchall()
    return {"state": "ok", "engines": engines, "least": least}


async def check_redis() -> Component:
    client = Redis.from_url(
        settings.REDIS_URL,
        retry=Retry(NoBackoff(), 0),
        socket_timeout=CHECK_TIMEOUT_S,
        socket_connect_timeout=CHECK_TIMEOUT_S,
    )
    try:
        seen = await client.mget([HEARTBEAT_KEY.format(process=name) for name in PROCESSES])
        async with client.pipeline(transaction=False) as pipe:
            for task in EACH_SECOND:
                pipe.hgetall(FAILING_KEY.format(task=task))
            pipe.get(FAILING_POLICIES_KEY)
            *failing, policies = await pipe.execute()
    finally:
        await client.aclose()
    told = {"failing": failing, "policies": failing_policies(policies)}
    return {"state": "ok", **dict(zip(PROCESSES, seen, strict=True)), **told}


async def check_gateway() -> Component:
    timeout = aiohttp.ClientTimeout(total=CHECK_TIMEOUT_S)
    async with (
        aiohttp.ClientSession(timeout=timeout) as session,
        session.get(f"{settings.GATEWAY_URL}/healthz", headers=bearer(settings.METRICS_TOKEN)) as answer,
    ):
        return gateway_state(answer.status, await answer.json())


def gateway_state(status: int, body: Mapping[str, Any]) -> Component:
    """From the answer of its /healthz."""
    if status != 200:
        return {"state": "down", "detail": f"answers {status}"}
    if "instances" not in body:
        return {"state": "down", "detail": "hides its instances: give it and the console the same METRICS_TOKEN"}
    serving = {name for name, state in body["instances"].items() if state == "up"}
    old = config_old(body)
    return {"state": "down" if old else "ok", "detail": old, "serving": serving}


def config_old(body: Mapping[str, Any]) -> str:
    """The problem if a gateway has an old configuration (a revoked key may still work there), else ""."""
    if "config_age_s" not in body:  # a gateway of an older release
        return ""
    age_s = body["config_age_s"]
    if age_s is None:
        return "has not read its configuration from the database yet"
    return f"has not read its configuration for {age_s:.0f} s" if age_s > CONFIG_OLD_S else ""


def heartbeat_state(redis: Component, process: str) -> Component:
    if redis["state"] != "ok":
        return {"state": "unknown", "detail": "Redis is unavailable"}
    raw = redis[process]
    if raw is None:
        return {"state": "down", "detail": "no heartbeat"}
    age_s = round(max(0.0, time.time() - float(raw)), 1)
    old = age_s > HEARTBEAT_OLD_S
    return {"state": "down" if old else "ok", "age_s": age_s, "detail": f"last seen {age_s} s ago" if old else ""}


def jobs_state(redis: Component) -> Component:
    """Periodic tasks, and scaling policies, that fail on every run."""
    if redis["state"] != "ok":
        return {"state": "unknown", "detail": "Redis is unavailable"}
    told = failing_in_words(redis["failing"], redis.get("policies"))
    return {"state": "down" if told else "ok", "detail": told}


def engines_state(postgres: Component, gateway: Component) -> Component:
    """Degraded if a model and role has fewer ready instances than its policy's minimum, but the model is served; down
    if a model with a policy is not served, or if no instance is ready at all.

    Ready means that the gateway can send to it. The check is against the minimum, not the desired number: an instance
    that the scaler has just requested must not turn a serving fleet unready.
    """
    if postgres["state"] != "ok" or "serving" not in gateway:
        return {"state": "unknown", "detail": "PostgreSQL or the gateway is unavailable"}
    ready = Counter((model, role) for id, model, role, well in postgres["engines"] if well and id in gateway["serving"])
    short = [each for each in postgres["least"] if ready[each[0], each[1]] < each[2]]
    missing = [f"{ready[model, role]} of {least} ready ({name}, {role})" for model, role, least, name in short]
    if not ready and not missing:
        missing = ["none ready"]
    served = bool(ready) and all(serves(ready, model) for model, *_ in short)
    return {
        "state": "ok" if not missing else "degraded" if served else "down",
        "ready": ready.total(),
        "total": len(postgres["engines"]),
        "detail": ", ".join(missing),
    }


def serves(ready: Mapping[tuple[Any, str], int], model: Any) -> bool:
    """Can its ready instances serve a request from prompt to last token?"""
    both = ready[model, Role.PREFILL] and ready[model, Role.DECODE]
    return bool(ready[model, Role.COLLOCATED] or both)


async def _bounded(check: Callable[[], Awaitable[Component]]) -> Component:
    try:
        async with asyncio.timeout(CHECK_TIMEOUT_S):
            return await check()
    except TimeoutError:
        return {"state": "down", "detail": f"no answer within {CHECK_TIMEOUT_S:g} s"}
    except Exception as error:  # whatever a broken component raises: its name is the answer
        return {"state": "down", "detail": type(error).__name__}
