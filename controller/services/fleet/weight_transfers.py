"""Weight transfers, recorded with the end of the action that made them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from django.utils import timezone

from controller.models import Action, Instance, Link, Transfer


def transfers_record(*, action: Action, attempts: Sequence[Mapping[str, Any]]) -> list[Transfer]:
    """One row for each attempt, in the order of the attempts. Up to three queries."""
    if not attempts:
        return []
    hosts = dict(
        Instance.objects.filter(
            pk__in=[action.instance_id, *(each["source"] for each in attempts if each["source"])]
        ).values_list("pk", "host_id")
    )
    links = _links_to(hosts.get(action.instance_id))
    now = timezone.now()
    rows = [
        Transfer(
            action=action,
            source_kind=each["kind"],
            source=each["source"],
            target=action.instance_id,
            link_id=links.get(hosts.get(each["source"])) if each["kind"] == "engine" else None,
            attempt=number,
            bytes=each["bytes"],
            seconds=each["seconds"],
            flow=each.get("flow", ""),
            held_s=min(each.get("held_s", 0.0), each["seconds"]),
            flow_level=each.get("level", 0),
            state=Transfer.State.FAILED if each["error"] else Transfer.State.DONE,
            error=each["error"],
            recorded_at=now,
        )
        for number, each in enumerate(attempts, start=1)
    ]
    return Transfer.objects.bulk_create(rows)


def _links_to(host_id: int | None) -> dict[int | None, int]:
    """The widest link by source host."""
    if host_id is None:
        return {}
    rows = Link.objects.filter(target_id=host_id).order_by("bandwidth_bytes_s").values_list("source_id", "pk")
    return dict(rows)
