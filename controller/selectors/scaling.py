"""The scaler's line and record: what it saw, what it did, and how long a started instance took to serve."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from statistics import median
from typing import Any

from django.db.models import OuterRef, Q, Subquery

from controller.models import Action, Decision, Instance, RequestRecord, ScalerState, ScalingPolicy, ScalingSample
from controller.models.fleet import Weights

STARTS_SHOWN = 20
LOADS = (Action.Kind.WEIGHTS_LOAD, Action.Kind.WAKE)
WEIGHTS_FROM = {"engine": "another engine", "host": "a host copy", "disk": "disk"}
SAMPLE_NEAR = timedelta(seconds=30)  # a sample further away says nothing about a moment


@dataclass(frozen=True, slots=True)
class Start:
    """One instance from wish to service, seconds after the wish; None: not yet, or never.

    Of one that was warm or asleep the wish is the scale-out that took it, and it is ready once its weights are there.
    """

    id: str
    source: str  # who provides it: process, static, kubernetes; and whether it was warm or asleep
    wished_at: datetime
    ready_s: float | None
    served_s: float | None  # first token of its first request
    weights: str = ""  # engine, host or disk, where an action brought them
    load_s: float | None = None
    cold: bool = False  # a process of its own, started for this wish

    @property
    def way(self) -> str:
        """What its time depends on: who provides it, how it began, and where its weights came from."""
        began = f"{self.source}, cold" if self.cold else self.source
        return f"{began}, weights from {WEIGHTS_FROM[self.weights]}" if self.weights in WEIGHTS_FROM else began


@dataclass(frozen=True, slots=True)
class WayTimes:
    """Medians over the starts of one way, seconds after the wish; `served` of `count` have given a first token."""

    way: str
    count: int
    served: int
    ready_s: float | None
    served_s: float | None
    load_s: float | None


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
    """The newest instances. One query; each first request is two looks into indexes: it decoded it, or prefilled it."""
    seen = RequestRecord.objects.filter(ttft_s__isnull=False).order_by("arrived_at")
    first = seen.filter(instance=OuterRef("pk"))
    handed = seen.filter(prefill_instance=OuterRef("pk")).exclude(prefill_instance="")
    loads = Action.objects.filter(
        instance=OuterRef("pk"), kind__in=LOADS, params__has_key="scale_out", state=Action.State.DONE
    ).order_by("-id")
    watched = Action.objects.filter(instance=OuterRef("pk"), kind=Action.Kind.FIRST_SERVED).order_by("-id")
    rows = (
        Instance.objects.exclude(weights=Weights.ABSENT)
        .order_by("-created_at")
        .annotate(
            first_arrived=Subquery(first.values("arrived_at")[:1]),
            first_ttft_s=Subquery(first.values("ttft_s")[:1]),
            handed_arrived=Subquery(handed.values("arrived_at")[:1]),
            handed_ttft_s=Subquery(handed.values("ttft_s")[:1]),
            taken_at=Subquery(loads.values("created_at")[:1]),
            loaded_at=Subquery(loads.values("ended_at")[:1]),
            scale_out=Subquery(loads.values("params__scale_out")[:1]),
            loaded=Subquery(loads.values("decision__outcome")[:1]),
            watched=Subquery(watched.values("decision__outcome")[:1]),
        )
    )
    return [_start(row) for row in rows[:limit]]


def _start(row: Any) -> Start:
    """`row`: an Instance as annotated above."""
    asked = row.scale_out or {}
    taken = asked.get("warm") or asked.get("woken")
    wished = row.taken_at if taken else row.created_at
    ready = row.loaded_at or row.ready_at
    served = None
    if asked.get("woken"):  # what it served before it slept does not count
        served = (row.watched or {}).get("first_served_s")
    elif (first_token := _first_token(row)) is not None:
        served = max(0.0, (first_token - wished).total_seconds())
    ready_s = None if ready is None else max(0.0, (ready - wished).total_seconds())
    how = ", woken" if asked.get("woken") else ", warm" if asked.get("warm") else ""
    loaded = row.loaded or {}
    weights, load_s = loaded.get("source", ""), loaded.get("load_s")
    cold = not taken and row.provisioner != "static"
    return Start(row.pk, row.provisioner + how, wished, ready_s, served, weights, load_s, cold)


def _first_token(row: Any) -> datetime | None:
    """Of the first request that it had a part in, as its client saw it."""
    seen = ((row.first_arrived, row.first_ttft_s), (row.handed_arrived, row.handed_ttft_s))
    return min((at + timedelta(seconds=ttft_s) for at, ttft_s in seen if at is not None), default=None)


def times_by_way(started: Sequence[Start]) -> list[WayTimes]:
    """By way, sorted by its name."""
    found = []
    for way in sorted({each.way for each in started}):
        mine = [each for each in started if each.way == way]
        served = [each.served_s for each in mine if each.served_s is not None]
        ready = [each.ready_s for each in mine if each.ready_s is not None]
        load = [each.load_s for each in mine if each.load_s is not None]
        medians = (median(values) if values else None for values in (ready, served, load))
        found.append(WayTimes(way, len(mine), len(served), *medians))
    return found
