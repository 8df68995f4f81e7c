"""The KV transfers of the last hour, replayed under each flow policy: the preview of the flow settings."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta

from controller.models import Instance, RequestRecord
from controller.selectors.fleet.links import kv_transfers
from controller.simulator.flows.replay import RecordedTransfer, ReplayedPolicy, replay_transfers

WINDOW = timedelta(hours=1)
MOST = 300  # the newest transfers; a page is rendered meanwhile
LONGEST_WAIT = timedelta(hours=1)  # between a request's arrival and its transfer


@dataclass(frozen=True, slots=True)
class FlowReplay:
    """`transfers`: how many were replayed. `policies`: empty without any."""

    transfers: int
    bandwidth: float
    policies: Sequence[ReplayedPolicy]


def replay_last_hour(now: datetime, bandwidth: float) -> FlowReplay:
    """`bandwidth`: bytes/s of each host's link. A transfer is due with its request's first token. Three queries."""
    rows = list(kv_transfers(outcome="done", since=now - WINDOW).filter(bytes__gt=0)[:MOST])
    arrived = RequestRecord.objects.filter(
        id__in={row.request for row in rows}, arrived_at__gte=now - WINDOW - LONGEST_WAIT
    )
    due = {id: at.timestamp() + ttft_s for id, at, ttft_s in arrived.values_list("id", "arrived_at", "target_ttft_s")}
    ids = {name for row in rows for name in (row.source, row.target)}
    # Of an instance without a host, or one that is forgotten, nothing is known but that it has a link.
    hosts = {id: host or id for id, host in Instance.objects.filter(pk__in=ids).values_list("pk", "host__name")}
    transfers = [
        RecordedTransfer(
            id=f"{row.pk}",
            at=row.started_at.timestamp(),
            due=due[row.request],
            size_bytes=float(row.bytes or 0),
            source=hosts.get(row.source, row.source),
            target=hosts.get(row.target, row.target),
        )
        for row in rows
        if row.request in due
    ]
    return FlowReplay(len(transfers), bandwidth, replay_transfers(transfers, bandwidth))
