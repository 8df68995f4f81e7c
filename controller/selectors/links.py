"""Links between instances, and the KV transfers over them: what pages and the control API show."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, timedelta

from django.db.models import Avg, Count, Max, Q, QuerySet, Sum
from django.utils import timezone

from controller.core.links import LinkState
from controller.models import InstanceLink, KvTransfer

ORDER = ("-started_at", "-id")
LATELY = timedelta(hours=1)


def instance_links(*, open: bool | None = True, instance: str | None = None) -> QuerySet[InstanceLink]:
    """By source and target. `open`: only those that are kept now (True), or only the others (False). `instance`: at
    either end."""
    rows = InstanceLink.objects.select_related("link__source", "link__target").order_by("source", "target", "-id")
    if open is not None:
        rows = rows.filter(closed_at__isnull=open)
    if instance is not None:
        rows = rows.filter(Q(source=instance) | Q(target=instance))
    return rows


@dataclass(frozen=True, slots=True)
class LinkCounts:
    """Of the links kept now."""

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
    """Newest first; slice it. `instance`: at either end. None: not asked."""
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


def transfers_of_request(request_id: str) -> list[KvTransfer]:
    """In the order in which they were tried. One query."""
    return sorted(kv_transfers(request=request_id), key=lambda row: (row.started_at, row.attempt))


@dataclass(frozen=True, slots=True)
class TransferSums:
    """Of an instance's transfers, either way. Means and the longest of those that arrived; None: none did."""

    sent: int
    received: int
    failed: int  # failed or undone
    sent_bytes: int
    received_bytes: int
    mean_s: float | None
    longest_s: float | None
    mean_overlap_s: float | None


def transfer_sums(instance: str, *, now: datetime | None = None) -> TransferSums:
    """Over the last hour. One query."""
    since = (now or timezone.now()) - LATELY
    done, out, into = Q(outcome="done"), Q(source=instance), Q(target=instance)
    sums = (
        kv_transfers(instance=instance, since=since)
        .order_by()
        .aggregate(
            sent=Count("pk", filter=done & out),
            received=Count("pk", filter=done & into),
            failed=Count("pk", filter=~done),
            sent_bytes=Sum("bytes", filter=done & out),
            received_bytes=Sum("bytes", filter=done & into),
            mean_s=Avg("seconds", filter=done),
            longest_s=Max("seconds", filter=done),
            mean_overlap_s=Avg("overlap_s", filter=done),
        )
    )
    moved = {name: sums[name] or 0 for name in ("sent_bytes", "received_bytes")}
    return TransferSums(**{**sums, **moved})
