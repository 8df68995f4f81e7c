"""Scaling: the load of each policy against its thresholds, what was done and why not more, and the policy editor."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime, timedelta
from typing import Any

from django.contrib import messages
from django.core.exceptions import ValidationError
from django.forms import Form
from django.http import HttpRequest, HttpResponse
from django.shortcuts import get_object_or_404, redirect, render
from django.utils import timezone
from django.views.decorators.http import require_GET, require_http_methods

from console import charts
from console.access import allows
from console.forms import TimeField
from console.scaling_forms import ScalingForm
from console.scaling_words import why
from console.sentences import figures_line, sentence
from console.views.classes import show_errors
from console.views.conflicts import Difference, differences
from controller.models import Decision, ScalingPolicy, ScalingSample
from controller.selectors import catalogue, scaling
from controller.selectors.roles import Role
from controller.services.actors import Actor
from controller.services.change import VersionConflict
from controller.services.scaling_policies import scaling_policy_create, scaling_policy_update

WINDOW = timedelta(hours=1)
EVENTS = 40


class Moment(Form):
    """When somebody wondered."""

    at = TimeField(label="At (UTC)")


@require_GET
@allows(Role.VIEWER)
def scaling_page(request: HttpRequest) -> HttpResponse:
    now, form = timezone.now(), Moment(request.GET)
    at = form.cleaned_data["at"] if form.is_valid() else None
    seen = scaling.samples(since=now - WINDOW, until=now)
    events = scaling.events(limit=EVENTS)
    cards = [card(policy, seen.get(policy.pk, []), events, now, at) for policy in scaling.policies()]
    started = scaling.starts()
    context = {
        "form": form,
        "asked": at,
        "cards": cards,
        "charts": {each["name"]: each["chart"] for each in cards},
        "events": [(decision, sentence(decision), figures_line(decision.inputs)) for decision in events],
        "starts": started,
        "ways": scaling.times_by_way(started),
    }
    return render(request, "console/scaling.html", context, status=200 if form.is_valid() else 422)


def card(
    policy: ScalingPolicy, seen: Sequence[ScalingSample], events: Sequence[Decision], now: datetime, at: datetime | None
) -> dict[str, Any]:
    subject = f"{policy.model.name}/{policy.role}"
    mine = [event for event in events if event.subject == subject]
    last = seen[-1] if seen else None
    then = scaling.sample_at(policy=policy, at=at) if at else None
    return {
        "policy": policy,
        "name": f"policy-{policy.pk}",
        "subject": subject,
        "last": last,
        "why": why(policy, last) if last else "",
        "then": then,
        "why_then": why(policy, then) if then else "",
        "chart": charts.scaling_load(
            [(row.at.timestamp(), row.load) for row in seen],
            [(row.at.timestamp(), float(row.ready)) for row in seen],
            [(event.at.timestamp(), event.kind, event.inputs.get("load"), sentence(event)) for event in mine],
            (policy.upper, policy.lower),
            charts.shortest_window([row.at.timestamp() for row in seen], now.timestamp(), WINDOW.total_seconds()),
        ),
    }


@require_http_methods(["GET", "POST"])
@allows(Role.OPERATOR)
def scaling_new(request: HttpRequest) -> HttpResponse:
    form = ScalingForm(request.POST or None)
    if request.method == "POST" and form.is_valid():
        try:
            row = scaling_policy_create(actor=Actor.person(request.user.get_username()), **form.values())
        except ValidationError as error:
            show_errors(form, error)
        else:
            messages.success(
                request, f"The policy of {row.model.name}, {row.role} is there; the scaler looks each second."
            )
            return redirect("scaling")
    return render(request, "console/scaling_form.html", {"form": form}, status=422 if form.errors else 200)


@require_http_methods(["GET", "POST"])
@allows(Role.OPERATOR)
def scaling_edit(request: HttpRequest, policy_id: int) -> HttpResponse:
    row = get_object_or_404(catalogue.scaling_policies(), pk=policy_id)
    form = ScalingForm(request.POST or None, existing=row)
    conflict: list[Difference] = []
    if request.method == "POST" and form.is_valid():
        version = form.cleaned_data["version"]
        actor = Actor.person(request.user.get_username())
        try:
            stored = scaling_policy_update(actor=actor, policy_id=row.pk, version=version, changes=form.values())
        except ValidationError as error:
            show_errors(form, error)
        except VersionConflict:
            row.refresh_from_db()
            conflict = differences(form, row, form.CHANGEABLE)
        else:
            same = stored.version == version
            messages.success(request, "Nothing was different." if same else f"Saved: {stored}. The next look uses it.")
            return redirect("scaling")
    status = 409 if conflict else 422 if form.errors else 200
    context = {"form": form, "row": row, "conflict": conflict}
    return render(request, "console/scaling_form.html", context, status=status)
