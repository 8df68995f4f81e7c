"""The state of every component, for signed-in users. Load balancers use `/healthz`, whose status needs no login."""

from __future__ import annotations

import time
from typing import Any, ClassVar

from rest_framework import serializers
from rest_framework.request import Request
from rest_framework.response import Response

from api.control.framework.base import SIGNED_IN, ControlView
from api.control.framework.documented import operation
from controller.core.staleness import is_fresh
from controller.selectors.health import database_health
from workers import live
from workers.tasks.failures import failing_in_words, read_failing, read_failing_policies

PROCESSES = ("worker", "analysis", "beat")
HEARTBEAT_OLD_S = 10.0  # a heartbeat is sent every 2 s
STATES = ("ok", "down", "stale", "unknown")


class ComponentOutput(serializers.Serializer):
    """One component. `stale`: it is alive, but its data is out of date."""

    name = serializers.CharField()
    state = serializers.ChoiceField(choices=STATES)
    detail = serializers.CharField(allow_blank=True)
    age_s = serializers.FloatField(allow_null=True, help_text="Age of its newest heartbeat, seconds.")


class HealthOutput(serializers.Serializer):
    """`status` is `ok` if every component is."""

    status = serializers.ChoiceField(choices=("ok", "degraded"))
    components = ComponentOutput(many=True, help_text="Empty for a tenant's key.")


class HealthView(ControlView):
    """Always 200; the body has the state of each component. Load balancers use `/healthz`, which needs no login."""

    access: ClassVar = {"GET": SIGNED_IN}

    @operation("health", "State of all components", answer=HealthOutput, errors=(401, 403, 429, 503))
    def get(self, request: Request) -> Response:
        components = [_postgres(), *_live_components(time.time())]
        ok = all(component["state"] == "ok" for component in components)
        shown = components if self.tenant_id is None else []  # hosts, gateways and errors are no tenant's matter
        return Response(HealthOutput({"status": "ok" if ok else "degraded", "components": shown}).data)


def _postgres() -> dict[str, Any]:
    health = database_health()
    return _component("postgres", "ok" if health.ok else "down", health.error)


def _live_components(now: float) -> list[dict[str, Any]]:
    try:
        fleets, seen = live.read_fleet(), live.read_heartbeats(PROCESSES)
        failing = failing_in_words(read_failing(), read_failing_policies())
    except live.LiveUnavailable as error:
        unknown = [_component(name, "unknown", "Redis is unavailable") for name in ("gateway", *PROCESSES, "jobs")]
        return [_component("redis", "down", str(error)), *unknown]
    gateways = [
        _aged(f"gateway {fleet['gateway']}", now - fleet["at"], is_fresh(fleet["at"], fleet["period_s"], now))
        for fleet in fleets
    ]
    processes = [_process(name, seen.get(name), now) for name in PROCESSES]
    jobs = _component("jobs", "down" if failing else "ok", failing)
    gateways = gateways or [_component("gateway", "down", "no gateway publishes its state")]
    return [_component("redis", "ok"), *gateways, *processes, jobs]


def _process(name: str, last: float | None, now: float) -> dict[str, Any]:
    if last is None:
        return _component(name, "down", "no heartbeat")
    return _aged(name, now - last, now - last <= HEARTBEAT_OLD_S)


def _aged(name: str, age_s: float, fresh: bool) -> dict[str, Any]:
    age_s = round(max(0.0, age_s), 1)
    return _component(name, "ok" if fresh else "stale", "" if fresh else f"last seen {age_s} s ago", age_s)


def _component(name: str, state: str, detail: str = "", age_s: float | None = None) -> dict[str, Any]:
    return {"name": name, "state": state, "detail": detail, "age_s": age_s}
