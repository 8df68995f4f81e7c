"""Simulates an unsaved edit: the newest traffic of a model, once as things are and once as edited."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime, timedelta
from typing import Any

from controller.core.errors import ConfigError
from controller.dispatch.policy_sets import ordering_of, with_ordering
from controller.flow.coordinator import LEAST_GATEWAYS
from controller.flow.gate import OFF
from controller.models import Experiment
from controller.selectors.experiments import traffic
from controller.selectors.experiments.edits import Edit, edit_as_json
from controller.selectors.experiments.fleet_model import default_model
from controller.selectors.experiments.fleet_past import fleet_then
from controller.selectors.experiments.kv_today import kv_today
from controller.selectors.experiments.policy_today import drop_budget_today, overrides_today
from controller.services.actors import Actor
from controller.services.experiments.commands import preview_create
from controller.services.experiments.specs import with_kv_today

WINDOW = timedelta(hours=1)
REQUESTS = 10_000
RECORDED, EDITED = "as recorded", "as edited"
FORECASTS = (
    "The simulated scheduler predicts the mean answer length of each kind of request, without learned bounds and "
    "without deadlines of workflows."
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


def preview_flow_settings(
    *,
    actor: Actor,
    ordering: str,
    options: Mapping[str, Any],
    drop_budget: float,
    gateways: int,
    model: str | None,
    policy: str,
    overrides: Mapping[str, Any],
    now: datetime,
) -> Experiment:
    """Create a preview of an ordering and a drop budget on the traffic of a model; None: the busiest one. `ordering`
    empty: that which gateways are started with, by `policy` and `overrides`. `gateways`: that run now; 0: unknown.

    Raises ConfigError as `_compare`, if both are those in force, if only the budget changes and nothing could be
    pruned, for an unknown ordering, and for a model without requests.
    """
    known = traffic.busiest_models(now - WINDOW, now)
    if model is not None and model not in known:
        raise ConfigError(f"no request for {model[:80]} is recorded in the last hour", field="workload.model")
    today, edited = overrides_today(overrides), with_ordering(overrides, ordering, options)
    budgets = (drop_budget_today(), drop_budget)
    kv = kv_today(model or next(iter(known), ""), now)
    cannot = _cannot_prune(gateways, links_count=kv is not None and kv.flow_policy != OFF)
    if ordering_of(policy, today) == ordering_of(policy, edited):
        if budgets[0] == budgets[1]:
            raise ConfigError("these are the ordering and the drop budget in force; change one", field="ordering")
        if cannot:
            raise ConfigError(cannot, field="drop_budget")
    before, after = (
        _policy(policy, each) | ({"pruning": {"drop_budget": budget}} if budget and not cannot else {})
        for each, budget in zip((today, edited), budgets, strict=True)
    )
    pruned = any(budgets) and not cannot
    notes = [FORECASTS, *([f"Pruning is not simulated: {cannot}."] if any(budgets) and cannot else ())]
    return _compare(
        actor, "Flow settings", model or next(iter(known), None), before, after, now, *notes,
        gateways=gateways if pruned else 1,
    )  # fmt: skip


def _cannot_prune(gateways: int, links_count: bool) -> str:
    """Why nothing can be pruned; empty if it can. `links_count`: transfer daemons order KV transfers of this model."""
    if gateways >= LEAST_GATEWAYS or (gateways and links_count):
        return ""
    if gateways:
        return (
            "one gateway is running and no transfer daemon orders KV transfers of this model; requests are pruned "
            "where they wait at several gateways, or for a link with ordered transfers"
        )
    return "no gateway is reporting, so it is unknown at how many gateways requests wait"


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
    gateways: int = 1,
) -> Experiment:
    """Create a preview that replays all traffic of a model in the last hour on the fleet of that time, since classes
    compete. The worker replays as many of the newest requests as ten seconds allow. `model` None: none has traffic.
    With several `gateways` requests come to them in turn.

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
        **({"settings": {"gateways": gateways}} if gateways > 1 else {}),
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
