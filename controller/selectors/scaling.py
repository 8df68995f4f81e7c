"""The scaler's line and record: what it saw, what it did, and how long a started instance took to serve."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from django.db.models import OuterRef, Q, Subquery

from controller.models import Action, Decision, Instance, RequestRecord, ScalerState, ScalingPolicy, ScalingSample
from controller.models.fleet import Weights

STARTS_SHOWN = 20
SAMPLE_NEAR = timedelta(seconds=30)  # a sample further away says nothing about a moment


@dataclass(frozen=True, slots=True)
class Start:
    """One instance from wish to service, seconds after the wish; None: not yet, or never.

    Of one from the warm pool the wish is the scale-out that took it, and it is ready once its weights are there.
    """

    id: str
    source: str  # who provides it: process, static, kubernetes; and whether it was warm
    wished_at: datetime
    ready_s: float | None
    served_s: float | None  # first token of its first request


def policies() -> list[ScalingPolicy]:
    """With the scaler's memory, by model and role."""
    return list(ScalingPolicy.objects.select_related("model", "state").order_by("model__name", "role"))


def state_of(policy: ScalingPolicy) -> ScalerState | None:
    return getattr(policy, "state", None)


def samples(*, since: datetime, until: datetime) -> dict[int, list[ScalingSample]]:
    """By policy, oldest first. One query."""
    found: dict[int, list[ScalingSample]] = {}
    for row in ScalingSample.objects.filter(at__gte=since, at__lt=until).order_by("policy_id", "at"):
        found.setdefault(row.policy_id, []).append(row)
    return found


def sample_at(*, policy: ScalingPolicy, at: datetime) -> ScalingSample | None:
    """The last one at or before a moment, if it is near enough to speak for it."""
    return ScalingSample.objects.filter(policy=policy, at__lte=at, at__gt=at - SAMPLE_NEAR).order_by("-at").first()


def events(*, subject: str | None = None, since: datetime | None = None, limit: int = 50) -> list[Decision]:
    """Decisions of the scaler, newest first."""
    kinds = Q(kind__startswith="scale_") | Q(kind="role_change")
    rows = Decision.objects.filter(kinds, subject_type="scaling_policy")
    if subject is not None:
        rows = rows.filter(subject=subject)
    if since is not None:
        rows = rows.filter(at__gte=since)
    return list(rows.order_by("-at", "-id")[:limit])


def starts(limit: int = STARTS_SHOWN) -> list[Start]:
    """The newest instances. One query; each first request is one look into an index."""
    first = RequestRecord.objects.filter(instance=OuterRef("pk"), ttft_s__isnull=False).order_by("arrived_at")
    loads = Action.objects.filter(
        instance=OuterRef("pk"), kind=Action.Kind.WEIGHTS_LOAD, params__scale_out__warm=True
    ).order_by("id")
    rows = (
        Instance.objects.exclude(weights=Weights.ABSENT)
        .order_by("-created_at")
        .annotate(
            first_arrived=Subquery(first.values("arrived_at")[:1]),
            first_ttft_s=Subquery(first.values("ttft_s")[:1]),
            taken_at=Subquery(loads.values("created_at")[:1]),
            loaded_at=Subquery(loads.values("ended_at")[:1]),
        )
    )
    return [_start(row) for row in rows[:limit]]


def _start(row: Any) -> Start:
    """`row`: an Instance as annotated above."""
    warm = row.taken_at is not None
    wished, ready = (row.taken_at, row.loaded_at) if warm else (row.created_at, row.ready_at)
    served = None
    if row.first_arrived is not None:
        first_token = row.first_arrived + timedelta(seconds=row.first_ttft_s)
        served = max(0.0, (first_token - wished).total_seconds())
    ready_s = None if ready is None else max(0.0, (ready - wished).total_seconds())
    return Start(row.pk, f"{row.provisioner}, warm" if warm else row.provisioner, wished, ready_s, served)
