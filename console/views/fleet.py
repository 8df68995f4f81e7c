"""Fleet and scaling: what is wished and what is there, the policies, and what the scaler did."""

from __future__ import annotations

from typing import Any

from django.http import HttpRequest, HttpResponse
from django.shortcuts import render
from django.views.decorators.http import require_GET

from console.access import allows
from console.live_view import merge_instances
from console.sentences import figures_line, sentence
from console.views.overview import read_fleets
from controller.models import Instance
from controller.selectors import catalogue, decisions
from controller.selectors import fleet as selectors
from controller.selectors.roles import Role

BADGES = {
    "ready": "ok",
    "starting": "accent",
    "pending": "accent",
    "draining": "warn",
    "unreachable": "bad",
    "failed": "bad",
    "stopped": "idle",
}
SCALE_EVENTS = 25


@require_GET
@allows(Role.VIEWER)
def fleet(request: HttpRequest) -> HttpResponse:
    live = {each["id"]: each for each in merge_instances(read_fleets())}
    events = decisions.search(subject_type="scaling_policy")[:SCALE_EVENTS]
    context = {
        "instances": [
            row_of(each, live.get(each.pk)) for each in selectors.instances_live().order_by("model__name", "role", "id")
        ],
        "policies": catalogue.scaling_policies(),
        "events": [(decision, sentence(decision), figures_line(decision.inputs)) for decision in events],
    }
    return render(request, "console/fleet.html", context)


def row_of(instance: Instance, seen: Any) -> dict[str, Any]:
    """The wish and the observation from the database, the load from a gateway where one reports it."""
    return {"row": instance, "badge": BADGES.get(instance.observed_state, "idle"), "live": seen}
