"""Links between instances and the KV transfers over them, for pages and the control API."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime

from django.db.models import Count, Q, QuerySet

from controller.core.kv_links import LinkState
from controller.models import InstanceLink, KvTransfer

ORDER = ("-started_at", "-id")


def instance_links(*, open: bool | None = True, instance: str | None = None) -> QuerySet[InstanceLink]:
    """Links by source and target. `open`: only current links (True), or only closed ones (False). `instance`: at either
    end."""
    rows = InstanceLink.objects.select_related("link__source", "link__target").order_by("source", "target", "-id")
    if open is not None:
        rows = rows.filter(closed_at__isnull=open)
    if instance is not None:
        rows = rows.filter(Q(source=instance) | Q(target=instance))
    return rows


@dataclass(frozen=True, slots=True)
class LinkCounts:
    """Counts of the current links."""

    connecting: int
    up: int
    degraded: int
    down: int

    @property
    def all(self) -> int:
        return self.connecting + self.up + self.degraded + self.down


def link_counts() -> LinkCounts:
    """One query."""
    rows = InstanceLink.objects.filter(closed_at__isnull=True).order_by()
    found = dict(rows.values_list("state").annotate(n=Count("pk")))
    return LinkCounts(*(found.get(state.value, 0) for state in LinkState))


def kv_transfers(
    *,
    request: str | None = None,
    instance: str | None = None,
    source: str | None = None,
    target: str | None = None,
    model: str | None = None,
    outcome: str | None = None,
    state: str | None = None,
    reason: str | None = None,
    since: datetime | None = None,
    until: datetime | None = None,
) -> QuerySet[KvTransfer]:
    """A query set to slice, newest first. `instance`: at either end. None: no filter."""
    exact = {
        "request": request,
        "source": source,
        "target": target,
        "model": model,
        "outcome": outcome,
        "state": state,
        "reason": reason,
        "started_at__gte": since,
        "started_at__lt": until,
    }
    rows = KvTransfer.objects.filter(**{name: value for name, value in exact.items() if value is not None})
    if instance is not None:
        rows = rows.filter(Q(source=instance) | Q(target=instance))
    return rows.order_by(*ORDER)
