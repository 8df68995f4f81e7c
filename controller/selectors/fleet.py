"""Instances for jobs and pages: what is wished, what is there, what it cost."""

from __future__ import annotations

from datetime import datetime

from django.db.models import F, QuerySet, Sum
from django.db.models.functions import Coalesce, Greatest, Least

from controller.models import Instance, InstanceInterval


def instances_live() -> QuerySet[Instance]:
    """Wanted, or still there."""
    return Instance.objects.live().select_related("model", "host")


def cost(*, since: datetime, until: datetime) -> float:
    """HyperFlexis eq. 3 over [since, until): provisioned seconds times unit cost, open intervals up to `until`."""
    rows = InstanceInterval.objects.filter(started_at__lt=until).exclude(ended_at__lte=since)
    length = Least(Coalesce(F("ended_at"), until), until) - Greatest(F("started_at"), since)
    by_price = rows.values("unit_cost").annotate(length=Sum(length)).order_by()
    return sum(row["unit_cost"] * row["length"].total_seconds() for row in by_price)
