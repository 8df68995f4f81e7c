"""The scaler's line and record: what it saw, what it did, and how long a started instance took to serve."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, timedelta

from django.db.models import OuterRef, Subquery

from controller.models import Decision, Instance, RequestRecord, ScalerState, ScalingPolicy, ScalingSample

STARTS_SHOWN = 20
SAMPLE_NEAR = timedelta(seconds=30)  # a sample further away says nothing about a moment


@dataclass(frozen=True, slots=True)
class Start:
    """One instance from wish to service, seconds after the wish; None: not yet, or never."""

    id: str
    source: str  # who provides it: process, static, kubernetes
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
    rows = Decision.objects.filter(subject_type="scaling_policy", kind__startswith="scale_")
    if subject is not None:
        rows = rows.filter(subject=subject)
    if since is not None:
        rows = rows.filter(at__gte=since)
    return list(rows.order_by("-at", "-id")[:limit])


def starts(limit: int = STARTS_SHOWN) -> list[Start]:
    """The newest instances. One query; each first request is one look into an index."""
    first = RequestRecord.objects.filter(instance=OuterRef("pk"), ttft_s__isnull=False).order_by("arrived_at")
    rows = Instance.objects.order_by("-created_at").annotate(
        first_arrived=Subquery(first.values("arrived_at")[:1]), first_ttft_s=Subquery(first.values("ttft_s")[:1])
    )
    return [_start(row) for row in rows[:limit]]


def _start(row: Instance) -> Start:
    served = None
    if row.first_arrived is not None:  # type: ignore[attr-defined]
        first_token = row.first_arrived + timedelta(seconds=row.first_ttft_s)  # type: ignore[attr-defined]
        served = max(0.0, (first_token - row.created_at).total_seconds())
    ready = None if row.ready_at is None else max(0.0, (row.ready_at - row.created_at).total_seconds())
    return Start(row.pk, row.provisioner, row.created_at, ready, served)
