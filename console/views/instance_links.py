"""Links of an instance, and the most recent KV transfers over them."""

from __future__ import annotations

from typing import Any

from controller.core.kv_links import LinkState
from controller.models import InstanceLink
from controller.selectors import links

BADGES = {LinkState.CONNECTING: "accent", LinkState.UP: "ok", LinkState.DEGRADED: "warn", LinkState.DOWN: "bad"}
OUTCOMES = {"done": "ok", "failed": "bad", "undone": "warn"}
TRANSFERS = 15
LINKS = 60  # shown of an instance, and of those not up on the Fleet page


def links_of(instance_id: str) -> dict[str, Any]:
    """For the page of an instance: links with badges, transfers with their peer. Two queries."""
    kept = links.instance_links(instance=instance_id)[:LINKS]
    transfers = [
        {
            "row": row,
            "badge": OUTCOMES.get(row.outcome, "idle"),
            "received": row.target == instance_id,
            "other": row.source if row.target == instance_id else row.target,
        }
        for row in links.kv_transfers(instance=instance_id)[:TRANSFERS]
    ]
    return {"instance_links": [with_badge(row) for row in kept], "transfers": transfers}


def links_in_trouble() -> dict[str, Any]:
    """For the Fleet page: the number of links by state, and those that are not up. At most two queries."""
    counts = links.link_counts()
    bad = links.instance_links().exclude(state=LinkState.UP.value)[:LINKS] if counts.all > counts.up else []
    return {"link_counts": counts, "instance_links": [with_badge(row) for row in bad]}


def with_badge(row: InstanceLink) -> tuple[InstanceLink, str]:
    return row, BADGES.get(LinkState(row.state), "idle")
