"""What the connector has moved, for vLLM's own metrics."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from controller.flow.gate import OFF
from workers.flowd.client import SCHEDULED, Flow

HELP = {
    "sent": "KV transfers that another server has confirmed.",
    "received": "KV transfers that arrived whole.",
    "sent_bytes": "Bytes of KV in confirmed transfers.",
    "received_bytes": "Bytes of KV that arrived.",
    "failed": "KV transfers that ended early, on either side.",
    "expired": "Prompts whose KV nobody loaded within the lease.",
    "unscheduled": "Transfers that no daemon scheduled although one is configured.",
    "promotions": "Levels by which transfers rose while they waited for the link.",
    "held_seconds": "Seconds for which transfers were held for others.",
    "receiving_seconds": "Seconds from order to arrival of the transfers that arrived.",
}


@dataclass(slots=True)
class KvFigures:
    """Since the start; they only grow, so another thread may read them. Units: see HELP."""

    sent: int = 0
    received: int = 0
    sent_bytes: int = 0
    received_bytes: int = 0
    failed: int = 0
    expired: int = 0
    unscheduled: int = 0
    promotions: int = 0
    held_seconds: float = 0.0
    receiving_seconds: float = 0.0

    def ended(self, flow: Flow | None) -> None:
        """A transfer that this server sent has ended, in whatever way."""
        if flow is not None:
            self.promotions += flow.promotions
            self.held_seconds += flow.held_s
            self.unscheduled += flow.reason not in (SCHEDULED, OFF)


def since(last: KvFigures, now: KvFigures) -> dict[str, float]:
    """What has grown."""
    before = asdict(last)
    return {name: value - before[name] for name, value in asdict(now).items() if value != before[name]}


def added(one: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, Any]:
    """Figures of HELP; others are left out."""
    return {name: one.get(name, 0) + other.get(name, 0) for name in HELP if name in one or name in other}
