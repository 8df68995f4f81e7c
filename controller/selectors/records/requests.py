"""Finished requests: search, and one request. No counts and no OFFSET, since the table has millions of rows."""

from __future__ import annotations

from datetime import datetime, timedelta

from django.db.models import Max, Q, QuerySet

from controller.models import AttainmentMinute, RequestRecord
from controller.slo.request_types import NOT_NAMED, RequestType

MINUTE = timedelta(minutes=1)
ORDER = ("-arrived_at", "-id")


def search(
    *,
    id: str | None = None,
    tenant: str | None = None,
    slo_class: str | None = None,
    model: str | None = None,
    instance: str | None = None,
    outcome: str | None = None,
    attained: bool | None = None,
    workflow: str | None = None,
    type: str | None = None,
    since: datetime | None = None,
    until: datetime | None = None,
    after: tuple[datetime, str] | None = None,
) -> QuerySet[RequestRecord]:
    """A query set to slice, newest first. `instance`: it decoded or prefilled them. `type`: a `RequestType`'s value.
    `after`: (arrived_at, id) of the last row of the previous page. None: no filter."""
    exact = {
        "id": id,
        "tenant": tenant,
        "slo_class": slo_class,
        "model": model,
        "outcome": outcome,
        "attained": attained,
        "workflow": workflow,
        "arrived_at__gte": since,
        "arrived_at__lt": until,
    }
    rows = RequestRecord.objects.filter(**{name: value for name, value in exact.items() if value is not None})
    if type is not None:
        rows = rows.filter(of_type(RequestType(type)))
    if instance is not None:
        rows = rows.filter(served_by(instance) if _prefilled_any(instance) else Q(instance=instance))
    if after is not None:
        at, last = after
        older = RequestRecord.objects.filter(arrived_at__lt=at) | RequestRecord.objects.filter(
            arrived_at=at, id__lt=last
        )
        rows = rows.filter(arrived_at__lte=at) & older
    return rows.order_by(*ORDER)


def of_type(wanted: RequestType) -> Q:
    """The same as `request_type`, for the database. What asks for nothing has no class, and classes have an index."""
    unnamed = Q(stands_for__gt=1, decisions__contains=[{"reason": NOT_NAMED}])
    alone, timed = Q(workflow="") & ~unnamed, Q(target_deadline_s__isnull=False)
    by_default = Q(slo_class="", decisions__contains=[{"kind": "slo", "reason": "defaults"}])
    return {
        RequestType.COMPOUND: ~Q(workflow="") | unnamed,
        RequestType.DEADLINE: alone & timed,
        RequestType.BEST_EFFORT: alone & ~timed & by_default,
        RequestType.LATENCY: alone & ~timed & ~by_default,
    }[wanted]


def served_by(instance: str) -> Q:
    """Requests that it decoded or whose KV it computed for another instance, by two indexes."""
    return Q(instance=instance) | Q(prefill_instance=instance)


def _prefilled_any(instance: str) -> bool:
    """One lookup in a small index. It spares most searches for an instance the second, larger index."""
    return RequestRecord.objects.filter(prefill_instance=instance).exclude(prefill_instance="").exists()


def until_model(model: str) -> datetime | None:
    """No request of this model arrived at or after this moment; None: no request at all. From the roll-up, since no
    index has models, and the newest rows of a model that is no longer served lie behind millions of others."""
    newest = AttainmentMinute.objects.filter(model=model).aggregate(newest=Max("minute"))["newest"]
    return None if newest is None else newest + MINUTE


def request_record(*, id: str, tenant: str | None = None) -> RequestRecord | None:
    """One record by its id, over all partitions. `tenant`: only if it belongs to this tenant."""
    return search(id=id, tenant=tenant).first()
