"""The audit log: newest first, by kind, actor, subject and time."""

from __future__ import annotations

from datetime import datetime
from typing import Any

from django.db.models import Q, QuerySet

from controller.models import ApiKey, Decision, Tenant
from controller.selectors.records.distinct import distinct

ORDER = ("-at", "-id")


def search(
    *,
    kind: str | None = None,
    actor: str | None = None,
    actor_type: str | None = None,
    subject_type: str | None = None,
    subject: str | None = None,
    request_id: str | None = None,
    since: datetime | None = None,
    until: datetime | None = None,
    text: str | None = None,
    bearing: Q | None = None,
    after: tuple[datetime, int] | None = None,
) -> QuerySet[Decision]:
    """A query set to slice. `after`: (at, id) of the last row of the previous page. `text`: part of kind, actor,
    subject or reason. `bearing`: see `causes`."""
    exact = {
        "kind": kind,
        "actor": actor,
        "actor_type": actor_type,
        "subject_type": subject_type,
        "subject": subject,
        "request_id": request_id,
        "at__gte": since,
        "at__lt": until,
    }
    rows = Decision.objects.filter(**{name: value for name, value in exact.items() if value is not None})
    if text:
        fields = ("kind", "actor", "subject", "reason")
        rows = rows.filter(Q(*((f"{name}__icontains", text) for name in fields), _connector=Q.OR))
    if bearing is not None:
        rows = rows.filter(bearing)
    if after is not None:
        at, last = after
        rows = rows.filter(Q(at__lt=at) | Q(at=at, id__lt=last), at__lte=at)
    return rows.order_by(*ORDER)


def about_tenant(tenant: Tenant) -> QuerySet[Decision]:
    """Decisions about a tenant and about its API keys: keys created, rotated and revoked."""
    keys = {key.pk: str(key) for key in ApiKey.objects.filter(tenant=tenant)}
    # Other tenants' keys can share beginning and name, so the id decides; the subject is what the index has.
    of_keys = Q(subject_type="api_key", subject__in=set(keys.values()), outcome__id__in=list(keys))
    return search(bearing=Q(subject_type="tenant", subject=tenant.name) | of_keys)


def values_at(*, kind: str, row_id: int | str, version: int) -> dict[str, Any]:
    """The values that a row had at `version`, of the fields that were changed since then. `kind`: of its changes.
    Empty if these decisions are no longer stored."""
    values: dict[str, Any] = {}
    later = Decision.objects.filter(kind=kind, outcome__id=row_id, outcome__version__gt=version)
    for decision in later.order_by("-id"):
        values |= decision.inputs.get("before", {})
    return values


def newest(limit: int = 50) -> list[Decision]:
    return list(search()[:limit])


def kinds() -> list[str]:
    """All kinds of recorded decisions, for a filter."""
    return distinct(Decision, "kind")
