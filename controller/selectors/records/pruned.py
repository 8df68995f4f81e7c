"""Requests that were pruned recently: served last, so that others were in time. Whether they met their targets too."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime, timedelta
from typing import NamedTuple

from django.db.models import Count, Q

from controller.models import RequestRecord

WINDOW = timedelta(minutes=10)  # no index has decisions, so all records of this time are read
SHOWN = 20


class PrunedLately(NamedTuple):
    """Of requests that arrived in the last `WINDOW` and have ended. `newest`: the last `SHOWN` of them."""

    requests: int
    attained: int
    newest: Sequence[RequestRecord]


def pruned_lately(now: datetime) -> PrunedLately:
    rows = RequestRecord.objects.filter(arrived_at__gte=now - WINDOW, decisions__contains=[{"kind": "prune"}])
    counted = rows.aggregate(requests=Count("id"), attained=Count("id", filter=Q(attained=True)))
    newest = rows.order_by("-arrived_at", "-id")[:SHOWN] if counted["requests"] else ()
    return PrunedLately(counted["requests"], counted["attained"], list(newest))
