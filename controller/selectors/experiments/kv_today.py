"""KV transfers between prefill and decode instances as engines measured them recently: the links of a simulation.

Only reference engines measure transfers, and they send KV while they compute (`overlap`). The duration of such a
transfer says more about its prefill than about the link, so the measured bandwidth of links is used first.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from statistics import median
from typing import Any

from controller.models import InstanceLink
from controller.selectors.fleet.links import kv_transfers

WINDOW = timedelta(days=1)
NEWEST = 200  # transfers that are read
GIGA = 1e9


@dataclass(frozen=True, slots=True)
class KvToday:
    """Medians over the newest transfers that arrived: bytes per prompt token, and layers. `gb_s`: 1e9 bytes/s of one of
    `links` now or, if none is measured, of one transfer."""

    gb_s: float
    bytes_per_token: int
    layers: int
    transfers: int
    links: int

    @property
    def note(self) -> str:
        last = f"the last {self.transfers:,} transfers"
        speed = f"KV moves at {self.gb_s:.3g} GB/s"
        size = f"{self.bytes_per_token:,} bytes a token"
        if not self.links:
            return f"{speed}, {size}: the medians of {last}."
        return f"{speed}, the median of {self.links:,} links; {size}, that of {last}."

    @property
    def settings(self) -> dict[str, Any]:
        """The `links` settings of a simulation."""
        return {"bandwidth_gb_s": self.gb_s, "overlap": True, "layers": self.layers}


NOT_MEASURED = "No KV transfer is on record: links and KV sizes are the simulator's defaults."


def kv_today(model: str, now: datetime) -> KvToday | None:
    """None if no engine measured a transfer of this model recently. Two queries."""
    rows = kv_transfers(model=model, outcome="done", since=now - WINDOW)
    measured = rows.filter(measured_by="engine", bytes__gt=0, seconds__gt=0, tokens__gt=0)
    figures = measured.values_list("bytes", "seconds", "tokens", "layers")[:NEWEST]
    found = [(size, s, tokens, layers or 1) for size, s, tokens, layers in figures if size and s and tokens]
    if not found:
        return None
    links = InstanceLink.objects.filter(model=model, closed_at__isnull=True, bandwidth_bytes_s__gt=0)
    measured_now = [speed for speed in links.values_list("bandwidth_bytes_s", flat=True) if speed]
    speed = median(measured_now or [size / seconds for size, seconds, _, _ in found])
    per_token = median(size / tokens for size, _, tokens, _ in found)
    layers = round(median(layers for *_, layers in found))
    return KvToday(speed / GIGA, max(1, round(per_token)), max(1, layers), len(found), len(measured_now))


def disaggregated(instances: Any) -> bool:
    """Whether a simulator's JSON has prefill and decode instances."""
    groups = instances if isinstance(instances, list) else [instances]
    roles = (group.get("role") for group in groups if isinstance(group, Mapping))
    return any(role in ("prefill", "decode") for role in roles)
