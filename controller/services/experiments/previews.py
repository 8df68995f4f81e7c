"""Simulates an unsaved edit: the newest traffic once with its own targets and once with the edited ones."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime, timedelta
from typing import Any

from controller.core.errors import ConfigError
from controller.models import Experiment
from controller.selectors.experiments import traffic
from controller.selectors.experiments.edits import Edit, edit_as_json
from controller.selectors.experiments.fleet_model import default_model
from controller.selectors.experiments.fleet_past import fleet_then
from controller.services.actors import Actor
from controller.services.experiments.commands import preview_create
from controller.services.experiments.specs import with_kv_today

WINDOW = timedelta(hours=1)
REQUESTS = 10_000
RECORDED, EDITED = "as recorded", "as edited"


def preview_order(
    *, actor: Actor, name: str, edit: Edit, policy: str, overrides: Mapping[str, Any], now: datetime
) -> Experiment:
    """Create a preview that replays all traffic of the last hour on the fleet of that time, since classes compete. The
    worker replays as many of the newest requests as ten seconds allow.

    Raises ConfigError if there is nothing to simulate: no traffic, no fleet or no fitted latency.
    """
    since = now - WINDOW
    model = traffic.busiest_model(since, now) or default_model()
    if model is None:
        raise ConfigError("no model exists yet", field="workload.model")
    window = traffic.RecordedWindow(since, now, model)
    requests = traffic.rows_of(window).count()
    if not requests:
        raise ConfigError(f"no request for {model} is recorded in the last hour", field="workload.since")
    fleet = fleet_then(model, since, now)
    each = {"name": policy, **({"overrides": dict(overrides)} if overrides else {})}
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
        "policies": [{**each, "label": RECORDED}, {**each, "label": EDITED, "retarget": edit_as_json(edit)}],
    }
    return preview_create(actor=actor, name=name, spec=spec, notes=[fleet.note, *with_kv_today(spec, model)])
