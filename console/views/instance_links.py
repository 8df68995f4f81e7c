"""What moved between an instance and others: the links it has, and the newest KV transfers over them."""

from __future__ import annotations

from typing import Any

from controller.core.kv_links import LinkState
from controller.models import InstanceLink
from controller.selectors import links

BADGES = {LinkState.CONNECTING: "accent", LinkState.UP: "ok", LinkState.DEGRADED: "warn", LinkState.DOWN: "bad"}
OUTCOMES = {"done": "ok", "failed": "bad", "undone": "warn"}
TRANSFERS = 15
LINKS = 60  # of an instance, and of those in trouble on the fleet's page


def links_of(instance_id: str) -> dict[str, Any]:
    """For the instance's page: links with their badge, transfers with their other end. Two queries."""
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
    """For the fleet's page: how many links are in which state, and those that are not up. One query, two if any."""
    counts = links.link_counts()
    bad = links.instance_links().exclude(state=LinkState.UP.value)[:LINKS] if counts.all > counts.up else []
    return {"link_counts": counts, "instance_links": [with_badge(row) for row in bad]}


def with_badge(row: InstanceLink) -> tuple[InstanceLink, str]:
    return row, BADGES.get(LinkState(row.state), "idle")
