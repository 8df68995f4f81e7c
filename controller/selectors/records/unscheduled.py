"""KV transfers and weight loads that went unscheduled lately although the flow policy is on.

KV transfers by what their requests' records say, weight loads by their own rows.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from datetime import datetime, timedelta
from typing import NamedTuple

from django.db import connection

from controller.models import Transfer

WINDOW = timedelta(minutes=10)
MOST = 1_000  # the newest transfers that are looked at
AS_INTENDED = ("", "scheduled", "off")
LONGEST_WAIT = timedelta(hours=1)  # between a request's arrival and its transfer

_QUERY = """
WITH moved AS MATERIALIZED (
    SELECT request FROM kv_transfer WHERE started_at >= %(since)s ORDER BY started_at DESC LIMIT %(most)s
)
SELECT step->'figures'->>'flow' AS reason, count(*)::bigint, (array_agg(r.id ORDER BY r.arrived_at DESC))[1]
FROM request_record r, jsonb_array_elements(r.decisions) AS step
WHERE r.arrived_at >= %(arrived)s AND r.id IN (SELECT request FROM moved)
    AND step->>'kind' = 'transfer' AND step->'figures'->>'flow' NOT IN ('', 'scheduled', 'off')
GROUP BY reason ORDER BY count(*) DESC, reason
"""


class UnscheduledTransfers(NamedTuple):
    """`reason`: as in `workers.flowd.client.Flow`. `newest`: the request of these that arrived last."""

    reason: str
    transfers: int
    newest: str


def unscheduled_lately(now: datetime) -> Sequence[UnscheduledTransfers]:
    """Of the transfers that began in the last `WINDOW`, at most the `MOST` newest, and whose requests have ended. The
    most frequent reason first. One query."""
    since = now - WINDOW
    with connection.cursor() as cursor:
        cursor.execute(_QUERY, {"since": since, "arrived": since - LONGEST_WAIT, "most": MOST})
        return [UnscheduledTransfers(*row) for row in cursor.fetchall()]


class UnscheduledLoads(NamedTuple):
    """`reason`: as in `workers.flowd.client.Flow`. `newest`: the instance whose load of these was recorded last."""

    reason: str
    loads: int
    newest: str


def loads_unscheduled_lately(now: datetime) -> Sequence[UnscheduledLoads]:
    """Of the attempts of weight loads that were recorded in the last `WINDOW`, at most the `MOST` newest. The most
    frequent reason first. One query."""
    rows = Transfer.objects.order_by("-id").values_list("flow", "target", "recorded_at")[:MOST]
    lately = [(flow, target) for flow, target, at in rows if at >= now - WINDOW and flow not in AS_INTENDED]
    newest = dict(reversed(lately))
    counted = sorted(Counter(flow for flow, _ in lately).items(), key=lambda each: (-each[1], each[0]))
    return [UnscheduledLoads(reason, loads, newest[reason]) for reason, loads in counted]
