"""The recorded decisions that affect a class: those that show an operator why its requests missed their targets."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta

from django.db.models import F, Max, Q, QuerySet

from controller.models import AttainmentMinute, Decision, Instance
from controller.models.fleet import Role
from controller.slo.classes import is_level_label

LEAD = timedelta(hours=1)  # before the newest miss, for what led to it
RECENT = timedelta(days=1)
MINUTE = timedelta(minutes=1)
LASTING = ("scale_hold", "scale_in", "scale_out", "role_change")  # each holds until its scaler's next one
POLICY_CHANGES = ("scaling_policy_created", "scaling_policy_updated", "scaling_policy_removed")


@dataclass(frozen=True, slots=True)
class ClassTraffic:
    """Requests of a tenant and class (None: all), as counted in one span. `keys`: "tenant/class"."""

    tenant: str | None
    slo_class: str | None
    keys: tuple[str, ...]
    models: tuple[str, ...]


def traffic(*, tenant: str | None, slo_class: str | None, since: datetime | None, until: datetime) -> ClassTraffic:
    """The models that served them, from the roll-up of at most the first day after `since` and the last before
    `until`."""
    seen = Q(minute__gt=until - RECENT - MINUTE)
    if since is not None:
        begun = Q(minute__gt=since - MINUTE)
        seen = begun & (seen | Q(minute__lt=since + RECENT))
    rows = _minutes(tenant, slo_class).filter(seen, minute__lt=until)
    found = set(rows.order_by().values_list("tenant", "slo_class", "model").distinct())
    keys = {f"{owner}/{name}" for owner, name, _ in found}
    if tenant is not None and slo_class is not None:
        keys.add(f"{tenant}/{slo_class}")
    return ClassTraffic(tenant, slo_class, tuple(sorted(keys)), tuple(sorted({model for *_, model in found})))


def looked_back_to(*, tenant: str | None, slo_class: str | None, until: datetime) -> datetime:
    """An hour before the newest miss of the last day; without any, an hour before `until`."""
    rows = _minutes(tenant, slo_class).filter(minute__gt=until - RECENT, minute__lt=until)
    newest = rows.filter(finished__gt=F("attained")).aggregate(newest=Max("minute"))["newest"]
    return (newest or until) - LEAD


def _minutes(tenant: str | None, slo_class: str | None) -> QuerySet[AttainmentMinute]:
    asked = {"tenant": tenant, "slo_class": slo_class}
    return AttainmentMinute.objects.filter(**{name: value for name, value in asked.items() if value is not None})


def bearing_on(whom: ClassTraffic) -> Q:
    """Decisions on refusals and expiries among them, on scaling and instances of their models, and on their targets."""
    about = Q(kind="refusals", inputs__by_class__has_any_keys=list(whom.keys))
    about |= Q(subject_type="scaling_policy", subject__in=_subjects(whom.models))
    mine = Instance.objects.filter(model__name__in=whom.models).values("pk")
    about |= Q(subject_type="instance", subject__in=mine) | Q(subject_type="served_model", subject__in=whom.models)
    for model in whom.models:
        about |= Q(kind__in=POLICY_CHANGES, subject__startswith=f"{model} ")
    if whom.slo_class:
        about |= Q(subject_type="slo_class", subject=whom.slo_class)
        if is_level_label(whom.slo_class):
            about |= Q(subject_type="priority_mapping")
    if whom.tenant:
        about |= Q(subject_type="tenant", subject=whom.tenant)
    return about


def in_force(models: Sequence[str], at: datetime) -> list[Decision]:
    """The last decision of each scaler of these models before a moment, which held until the next one. One query."""
    looks = lasting(models, at)
    return sorted(looks[0].union(*looks[1:], all=True), key=lambda each: each.at) if looks else []


def lasting(models: Sequence[str], at: datetime) -> list[QuerySet[Decision]]:
    """The same as one index lookup for each scaler, to be joined with other rows."""
    rows = Decision.objects.filter(subject_type="scaling_policy", kind__in=LASTING, at__lt=at).order_by("-at", "-id")
    return [rows.filter(subject=subject)[:1] for subject in _subjects(models)]


def _subjects(models: Sequence[str]) -> list[str]:
    return [f"{model}/{role}" for model in models for role in Role.values]
