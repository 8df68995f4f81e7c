"""Simulates an unsaved edit: the newest traffic of a model, once as things are and once as edited."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime, timedelta
from typing import Any

from controller.core.errors import ConfigError
from controller.dispatch.policy_sets import ordering_of, with_ordering
from controller.models import Experiment
from controller.selectors.experiments import traffic
from controller.selectors.experiments.edits import Edit, edit_as_json
from controller.selectors.experiments.fleet_model import default_model
from controller.selectors.experiments.fleet_past import fleet_then
from controller.selectors.experiments.policy_today import overrides_today
from controller.services.actors import Actor
from controller.services.experiments.commands import preview_create
from controller.services.experiments.specs import with_kv_today

WINDOW = timedelta(hours=1)
REQUESTS = 10_000
RECORDED, EDITED = "as recorded", "as edited"
FORECASTS = (
    "The scheduler expects the mean answer length of a kind of requests, without learned bounds, and hears of no "
    "deadlines of workflows."
)


def preview_order(
    *, actor: Actor, name: str, edit: Edit, policy: str, overrides: Mapping[str, Any], now: datetime
) -> Experiment:
    """Create a preview of new targets on the busiest model's traffic. `overrides`: those that gateways are started
    with. Raises as `_compare`.
    """
    each = _policy(policy, overrides_today(overrides))
    edited = {**each, "retarget": edit_as_json(edit)}
    return _compare(actor, name, traffic.busiest_model(now - WINDOW, now), each, edited, now)


def preview_ordering(
    *,
    actor: Actor,
    ordering: str,
    options: Mapping[str, Any],
    model: str | None,
    policy: str,
    overrides: Mapping[str, Any],
    now: datetime,
) -> Experiment:
    """Create a preview of an ordering on the traffic of a model; None: the busiest one. `ordering` empty: that which
    gateways are started with, by `policy` and `overrides`.

    Raises ConfigError as `_compare`, if the ordering is the one in force or unknown, and for a model without requests.
    """
    known = traffic.busiest_models(now - WINDOW, now)
    if model is not None and model not in known:
        raise ConfigError(f"no request for {model[:80]} is recorded in the last hour", field="workload.model")
    today, edited = overrides_today(overrides), with_ordering(overrides, ordering, options)
    if ordering_of(policy, today) == ordering_of(policy, edited):
        raise ConfigError("this is the ordering in force; choose another one or other options", field="ordering")
    before, after = _policy(policy, today), _policy(policy, edited)
    return _compare(actor, "Ordering", model or next(iter(known), None), before, after, now, FORECASTS)


def _policy(name: str, overrides: Mapping[str, Any]) -> dict[str, Any]:
    return {"name": name, **({"overrides": dict(overrides)} if overrides else {})}


def _compare(
    actor: Actor,
    name: str,
    model: str | None,
    before: Mapping[str, Any],
    after: Mapping[str, Any],
    now: datetime,
    *notes: str,
) -> Experiment:
    """Create a preview that replays all traffic of a model in the last hour on the fleet of that time, since classes
    compete. The worker replays as many of the newest requests as ten seconds allow. `model` None: none has traffic.

    Raises ConfigError if there is nothing to simulate: no traffic, no fleet or no fitted latency.
    """
    since, model = now - WINDOW, model or default_model()
    if model is None:
        raise ConfigError("no model exists yet", field="workload.model")
    requests = traffic.rows_of(traffic.RecordedWindow(since, now, model)).count()
    if not requests:
        raise ConfigError(f"no request for {model} is recorded in the last hour", field="workload.since")
    fleet = fleet_then(model, since, now)
    spec: dict[str, Any] = {
        "name": name,
        "instances": fleet.groups,
        "seeds": [1],
        "workload": {
            "kind": "window",
            "since": since.isoformat(),
            "until": now.isoformat(),
            "model": model,
            "requests": REQUESTS,
            "newest": REQUESTS,
            "of": requests,
            "sources": True,
        },
        "policies": [{**before, "label": RECORDED}, {**after, "label": EDITED}],
    }
    said = [fleet.note, *with_kv_today(spec, model), *notes]
    return preview_create(actor=actor, name=name, spec=spec, notes=said)
