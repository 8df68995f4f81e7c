"""Scaling: load of each policy against its thresholds, decisions and their reasons, and the policy form."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from datetime import datetime, timedelta
from functools import partial
from typing import Any

from django.contrib import messages
from django.core.exceptions import BadRequest
from django.forms import Form
from django.http import HttpRequest, HttpResponse, JsonResponse
from django.shortcuts import get_object_or_404, redirect, render
from django.template.loader import render_to_string
from django.urls import reverse
from django.utils import timezone
from django.views.decorators.gzip import gzip_page
from django.views.decorators.http import require_GET, require_http_methods, require_POST

from console.access import actor_of, allows
from console.charts import base as charts
from console.forms.base import TimeField
from console.forms.numbers import number_of
from console.forms.scaling import HoldForm, ScalingForm
from console.forms.unsaved_forms import data_of
from console.live.polled import SHARED_S, AsOf, PagePart, charts_due
from console.live.ttl_cache import TtlCache
from console.removed import says_if_removed
from console.views.configuration.changes import before_of
from console.views.editing import STALE, Difference, created, differences, form_page, say_updated, updated, written
from controller.models import Decision, ScalingPolicy, ScalingSample
from controller.selectors import catalogue
from controller.selectors.fleet import scaling
from controller.selectors.fleet.scaling import Counts, InstanceStart
from controller.selectors.roles import UserRole, role_of
from controller.services.change import VersionConflict
from controller.services.fleet.scaling_policies import (
    scaling_policy_create,
    scaling_policy_hold,
    scaling_policy_release,
    scaling_policy_update,
)
from controller.wording.scaling import warm_in_words, why
from controller.wording.sentences import figures_line, sentence

WINDOW = timedelta(hours=1)
AROUND = WINDOW / 2  # before and after a chosen time
SECOND = timedelta(seconds=1)
EVENTS = 40  # in the table, around a chosen time
LATEST = 12  # in the table of now; the audit has the others
MARKS = 400  # on the charts
PATIENCE_S = 20.0  # the scaler stores a sample every five seconds, or at each evaluation if those are less frequent
SAMPLE_PERIODS = 3
POLLED: dict[bool, TtlCache[PagePart]] = {may: TtlCache(SHARED_S) for may in (False, True)}


class Moment(Form):
    """The time to show; empty for now."""

    at = TimeField(label="Time (UTC)")


@require_GET
@allows(UserRole.VIEWER)
def scaling_page(request: HttpRequest) -> HttpResponse:
    """The current state with live updates, or the state around a time in the past (`?at=`)."""
    form = Moment(request.GET)
    at = form.cleaned_data["at"] if form.is_valid() else None
    context = {"form": form, **scaling_context(timezone.now(), at)}
    return render(request, "console/scaling/scaling.html", context, status=200 if form.is_valid() else 422)


@gzip_page
@require_GET
@allows(UserRole.VIEWER)
def scaling_live(request: HttpRequest) -> JsonResponse:
    """The live part of the page: one version for users who can edit policies, one for all others."""
    can_act = role_of(request.user) >= UserRole.OPERATOR
    return POLLED[can_act].get(lambda: scaling_part(can_act)).answer(charts_due(request))


def scaling_part(can_act: bool) -> PagePart:
    context = scaling_context(timezone.now(), None) | {"can_act": can_act}
    html = render_to_string("console/scaling/_scaling_live.html", context)
    return PagePart(html, context["as_of"], context["charts"])


def scaling_context(now: datetime, at: datetime | None) -> dict[str, Any]:
    since, until = (at - AROUND, min(now, at + AROUND)) if at else (now - WINDOW, now)
    seen = scaling.samples(since=since, until=until)
    policies, events, started = scaling.policies(), *done_and_started(at, since, until)
    then = scaling.samples_at(at=to_its_end(at)) if at else {}
    shown = scaling.as_of(policies, at) if at else policies
    there = {} if at else scaling.instances_now()
    pools = {} if at else scaling.warm_pools(shown)
    shown_events = nearest(events, at)
    cards, drawn = [], [event for event in events if event.at >= since]
    for policy in shown:
        looks = seen.get(policy.pk, [])
        state = as_asked(policy, then.get(policy.pk)) if at else as_now(policy, looks, there, now)
        warm = {"warm": warm_in_words(policy, pools.get(policy.pk))}
        cards.append(card(policy, looks, drawn, until, at) | state | warm)
    return {
        "asked": at,
        "cards": cards,
        "charts": {each["name"]: each["chart"] for each in cards},
        "events": [(decision, sentence(decision), figures_line(decision.inputs)) for decision in shown_events],
        "latest": LATEST,
        "first_after": next((event.pk for event in shown_events if at and event.at > at), None),
        "starts": started,
        "ways": scaling.times_by_way(started),
        "as_of": last_evaluation(policies, seen, now),
    }


def to_its_end(at: datetime) -> datetime:
    """The end of a second that was entered without a fraction, so that evaluations within that second are included."""
    return at if at.microsecond else at + SECOND - timedelta(microseconds=1)


def done_and_started(
    at: datetime | None, since: datetime, until: datetime
) -> tuple[list[Decision], list[InstanceStart]]:
    """Decisions and starts. Now: newest first. Around a time: the nearest on both sides, in order of time."""
    if at is None:
        return scaling.events(limit=MARKS), scaling.starts()
    events = scaling.events_around(at=at, since=since, until=until, limit=MARKS)
    return events, scaling.starts_around(at=at, since=since, until=until)


def nearest(events: Sequence[Decision], at: datetime | None) -> Sequence[Decision]:
    """The events that fit the table, in the given order."""
    if at is None:
        return events[:LATEST]
    near = sorted(events, key=lambda each: abs(each.at - at))[:EVENTS]
    return sorted(near, key=lambda each: (each.at, each.pk))


def last_evaluation(
    policies: Sequence[ScalingPolicy], seen: Mapping[int, Sequence[ScalingSample]], now: datetime
) -> AsOf:
    """The last evaluation of the policy that has waited longest for one."""
    watched = [policy for policy in policies if policy.enabled]
    if not watched:
        return AsOf(now.timestamp(), PATIENCE_S)
    longest_s = max(map(patience_s, watched))
    # A policy that was just created or enabled could not have been evaluated earlier.
    last = [
        max([policy.updated_at.timestamp(), *(sample.at.timestamp() for sample in seen.get(policy.pk, ())[-1:])])
        for policy in watched
    ]
    silent = now.timestamp() - min(last) > longest_s
    unseen = silent and not all(seen.get(policy.pk) for policy in watched)
    text = "The scaler has not run for an hour" if unseen else "The scaler is not running" if silent else ""
    return AsOf(None if unseen else min(last), longest_s, text)


def card(
    policy: ScalingPolicy,
    seen: Sequence[ScalingSample],
    events: Sequence[Decision],
    until: datetime,
    at: datetime | None,
) -> dict[str, Any]:
    """One policy with its chart; `policy` as it was at the chosen time, if any."""
    subject = f"{policy.model.name}/{policy.role}"
    mine = [event for event in events if event.subject == subject]
    return {
        "policy": policy,
        "name": f"policy-{policy.pk}",
        "held": policy.held(at or timezone.now()),
        "subject": subject,
        "chart": charts.scaling_load(
            [(row.at.timestamp(), row.load) for row in seen],
            [(row.at.timestamp(), float(row.ready)) for row in seen],
            [(event.at.timestamp(), event.kind, event.inputs.get("load"), sentence(event)) for event in mine],
            (policy.upper, policy.lower),
            charts.shortest_window([row.at.timestamp() for row in seen], until.timestamp(), WINDOW.total_seconds()),
            at.timestamp() if at else None,
            patience_s(policy),
        ),
    }


def patience_s(policy: ScalingPolicy) -> float:
    """The longest gap between two samples while the scaler evaluates the policy."""
    return max(PATIENCE_S, SAMPLE_PERIODS * policy.interval_s)


def as_asked(policy: ScalingPolicy, then: ScalingSample | None) -> dict[str, Any]:
    return {
        "then": then,
        "counts": then,
        "load": then and then.load,
        "why_then": why(policy, then, policy.held(then.at)) if then else "",
    }


def as_now(
    policy: ScalingPolicy, seen: Sequence[ScalingSample], there: Mapping[tuple[int, str], Counts], now: datetime
) -> dict[str, Any]:
    """Current state. Load is known only while the scaler evaluates the policy; instance counts always are."""
    last = seen[-1] if seen else None
    evaluated = policy.enabled and last is not None and (now - last.at).total_seconds() <= patience_s(policy)
    return {
        "last": last,
        "evaluated": evaluated,
        "counts": there.get((policy.model_id, policy.role), Counts()),
        "load": last.load if last is not None and evaluated else None,
        "why": why(policy, last, policy.held(now)) if last is not None and evaluated else "",
    }


@require_http_methods(["GET", "POST"])
@allows(UserRole.OPERATOR)
def scaling_new(request: HttpRequest) -> HttpResponse:
    form = ScalingForm(data_of(request))
    told = "Scaling policy of {0.model.name}, {0.role} created. It is evaluated every second.".format
    if created(request, form, scaling_policy_create, told) is not None:
        return redirect("scaling")
    return form_page(request, "console/scaling/scaling_form.html", form)


@require_http_methods(["GET", "POST"])
@allows(UserRole.OPERATOR)
@says_if_removed("scaling_policy")
def scaling_edit(request: HttpRequest, policy_id: int) -> HttpResponse:
    row = get_object_or_404(catalogue.scaling_policies(), pk=policy_id)
    form = ScalingForm(data_of(request), existing=row)
    conflict: list[Difference] = []
    if request.method == "POST" and form.is_valid():
        write = partial(scaling_policy_update, actor=actor_of(request), policy_id=row.pk)
        stored, conflict = updated(form, row, write)
        if stored is not None:
            text = f"Scaling policy of {row.model.name}, {row.role} updated. The next evaluation uses it."
            say_updated(request, form, stored, text)
            return redirect("scaling")
    elif request.method == "GET":
        form.initial.update(restored(request, row))
    restoring = "restore" in request.GET
    return form_page(request, "console/scaling/scaling_form.html", form, conflict, row=row, restoring=restoring)


@require_http_methods(["GET", "POST"])
@allows(UserRole.OPERATOR)
@says_if_removed("scaling_policy")
def scaling_hold(request: HttpRequest, policy_id: int) -> HttpResponse:
    """Scale by hand: so many instances until a time, for a reason."""
    row = get_object_or_404(catalogue.scaling_policies(), pk=policy_id)
    form = HoldForm(data_of(request), existing=row)
    conflict: list[Difference] = []
    if request.method == "POST" and form.is_valid():
        write = partial(scaling_policy_hold, actor=actor_of(request), policy_id=row.pk)
        stored, conflict = held(form, row, write)
        if stored is not None:
            messages.success(request, f"{row.model.name}, {row.role} is set to {stored.held_instances} by hand.")
            return redirect("scaling")
    return form_page(request, "console/scaling/scaling_hold.html", form, conflict, **hold_context(row))


def hold_context(row: ScalingPolicy) -> dict[str, Any]:
    there = scaling.instances_now().get((row.model_id, row.role), Counts())
    return {"row": row, "held": row.held(timezone.now()), "there": there, "back": reverse("scaling")}


def held(
    form: HoldForm, row: ScalingPolicy, write: Callable[..., ScalingPolicy]
) -> tuple[ScalingPolicy | None, list[Difference]]:
    """The policy as it was stored, or None with what is different: somebody else changed it meanwhile."""
    try:
        return written(form, lambda: write(version=form.cleaned_data["version"], **form.values())), []
    except VersionConflict:
        row.refresh_from_db()
        return None, differences(form, row, form.CHANGEABLE)


@require_POST
@allows(UserRole.OPERATOR)
@says_if_removed("scaling_policy")
def scaling_release(request: HttpRequest, policy_id: int) -> HttpResponse:
    """End a hold, unless the policy changed since the page was loaded (`version`): then 412 with what is set now."""
    row = get_object_or_404(catalogue.scaling_policies(), pk=policy_id)
    version = number_of(request.POST.get("version", ""))
    if version is None:
        raise BadRequest("version must be the one that was shown")
    try:
        scaling_policy_release(actor=actor_of(request), policy_id=row.pk, version=version)
    except VersionConflict:
        row.refresh_from_db()
        context = {"form": HoldForm(existing=row), "release_refused": True, **hold_context(row)}
        return render(request, "console/scaling/scaling_hold.html", context, status=STALE)
    messages.success(request, f"{row.model.name}, {row.role} is scaled by load again.")
    return redirect("scaling")


def restored(request: HttpRequest, row: ScalingPolicy) -> dict[str, Any]:
    """Values before a recorded change, to revert it: shown, not saved."""
    before = before_of(request, "scaling_policy", row)
    return {name: before[name] for name in ScalingForm.CHANGEABLE if name in before}
