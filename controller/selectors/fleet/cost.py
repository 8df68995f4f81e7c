"""The cost of instances, from the intervals for which they were provisioned."""

from __future__ import annotations

from datetime import datetime
from typing import NamedTuple

from django.db.models import Count, F, Sum
from django.db.models.functions import Coalesce, Greatest, Least

from controller.models import InstanceInterval


def cost(*, since: datetime, until: datetime) -> float:
    """HyperFlexis eq. 3 over [since, until): provisioned seconds times unit cost, open intervals up to `until`."""
    rows = InstanceInterval.objects.filter(started_at__lt=until).exclude(ended_at__lte=since)
    length = Least(Coalesce(F("ended_at"), until), until) - Greatest(F("started_at"), since)
    by_price = rows.values("unit_cost").annotate(length=Sum(length)).order_by()
    return sum(row["unit_cost"] * row["length"].total_seconds() for row in by_price)


class CostRate(NamedTuple):
    """What is provisioned now: cost units/s and number of instances."""

    per_s: float
    instances: int


def cost_rate() -> CostRate:
    """The cost of the fleet as long as it does not change: the unit costs of all open intervals."""
    row = InstanceInterval.objects.filter(ended_at__isnull=True).aggregate(per_s=Sum("unit_cost"), count=Count("pk"))
    return CostRate(row["per_s"] or 0.0, row["count"])
