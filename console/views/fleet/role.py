"""The confirmation page of a role change: the effects of each role, or why it is not possible."""

from __future__ import annotations

from django.contrib import messages
from django.core.exceptions import BadRequest, ValidationError
from django.http import HttpRequest, HttpResponse
from django.shortcuts import get_object_or_404, redirect, render
from django.views.decorators.http import require_http_methods

from console.access import actor_of, allows
from console.forms.numbers import number_of
from console.panels.instance_conflict import conflict_context
from console.panels.role_change import Prospect, prospects
from console.views.editing import STALE
from controller.models import Instance
from controller.selectors import catalogue
from controller.selectors.roles import UserRole
from controller.services.change import VersionConflict
from controller.services.fleet.role_switches import role_order
from workers.backends.registry import BACKENDS
from workers.notices import announce_config


@require_http_methods(["GET", "POST"])
@allows(UserRole.OPERATOR)
def instance_role(request: HttpRequest, instance_id: str) -> HttpResponse:
    """GET shows the effects; POST changes the role, unless the instance changed since then (`version`): then 412 with
    what is different (`seen`: the states that the page showed)."""
    row = get_object_or_404(catalogue.instances(), pk=instance_id)
    found = prospects_of(row)
    if request.method == "GET":
        return render(request, "console/fleet/instance_role.html", {"row": row, "prospects": found})
    chosen, version = request.POST.get("role", ""), number_of(request.POST.get("version", ""))
    prospect = next((each for each in found if each.role == chosen), None)
    if version is None or (prospect is None and chosen != row.role):
        raise BadRequest("role must be collocated, prefill or decode; version must be the one that was shown")
    if version != row.version:
        return role_conflict(request, row.pk, chosen, version)
    if prospect is not None and prospect.refused:
        messages.error(request, prospect.refused)
        return redirect("instance-role", row.pk)
    actor = actor_of(request)
    try:
        action = role_order(actor=actor, instance_id=row.pk, role=chosen, version=version)
    except VersionConflict:
        return role_conflict(request, row.pk, chosen, version)
    except ValidationError as error:
        messages.error(request, " ".join(error.messages))
    else:
        announce_config()
        done = f"The role of {row.pk} is now {chosen}. Gateways use it within a second."
        ordered = f"{row.pk} switches to {chosen} once its running requests finish."
        messages.success(request, done if action is None else ordered)
    return redirect("instance", row.pk)


def role_conflict(request: HttpRequest, instance_id: str, chosen: str, version: int) -> HttpResponse:
    row = get_object_or_404(catalogue.instances(), pk=instance_id)
    prospect = next((each for each in prospects_of(row) if each.role == chosen), None)
    refused = f"The role of {row.pk} is {chosen} already." if prospect is None else prospect.refused
    effects = prospect.effects if prospect is not None else []
    context = conflict_context(row, version, request.POST.get("seen", "")) | {"field": "role", "value": chosen}
    context |= {"asked": f"Change role to {chosen}", "refused": refused, "effects": effects}
    return render(request, "console/fleet/instance_conflict.html", context, status=STALE)


def prospects_of(row: Instance) -> list[Prospect]:
    wanted = catalogue.instances(live=True).filter(model=row.model, desired_state=Instance.Desired.RUNNING)
    policies = {each.role: each for each in catalogue.scaling_policies().filter(model=row.model, enabled=True)}
    disaggregates = row.backend in BACKENDS and BACKENDS[row.backend].capabilities.disaggregates
    return prospects(row, wanted, policies, disaggregates)
