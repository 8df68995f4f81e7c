"""What an unsaved edit would have changed in the last hour, computed in the database."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from controller.models import PriorityMapping, RequestRecord, SLOClass
from controller.selectors.experiments.edits import Edit, judged, owners_of

WINDOW = timedelta(hours=1)
JUDGED_MAX = 200_000  # the newest requests, so that a page answers within a second


@dataclass(frozen=True, slots=True)
class Judged:
    """`rows`: by tenant and class; `total`: their sum. `since`: start of the traffic; `cut`: it is less than the
    hour."""

    rows: list[dict[str, Any]]
    total: dict[str, Any]
    since: datetime
    cut: bool


def last_hour(edit: Edit, now: datetime) -> Judged:
    """One query for the figures, and one for how far back JUDGED_MAX requests reach."""
    hour = RequestRecord.objects.filter(arrived_at__gte=now - WINDOW, arrived_at__lt=now)
    edge = hour.order_by("-arrived_at").values_list("arrived_at", flat=True)[JUDGED_MAX : JUDGED_MAX + 1].first()
    rows = judged(edit, hour if edge is None else hour.filter(arrived_at__gt=edge))
    names = [name for name in rows[0] if name not in ("tenant", "slo_class")] if rows else []
    total = {name: sum(row[name] for row in rows) for name in names}
    return Judged([_shares(row) for row in rows], _shares(total), edge or now - WINDOW, edge is not None)


def _shares(row: dict[str, Any]) -> dict[str, Any]:
    """The shares of the counts; None without a request."""
    requests = row.get("requests", 0)
    names = ("was", "would", "ttft", "would_ttft", "tpot", "would_tpot")
    return {**row, **{f"{name}_share": row[name] / requests if requests else None for name in names if name in row}}


def class_owners(row: SLOClass) -> Any:
    """The tenants that a shared class applies to: all without a class of the same name."""
    others = SLOClass.objects.filter(name=row.name, tenant__isnull=False).values_list("tenant__name", flat=True)
    return owners_of(row.tenant.name if row.tenant else None, [name for name in others if name])


def mapping_owners(row: PriorityMapping) -> Any:
    others = PriorityMapping.objects.filter(tenant__isnull=False).values_list("tenant__name", flat=True)
    return owners_of(row.tenant.name if row.tenant else None, [name for name in others if name])
