"""KV transfers between prefill and decode instances as engines measured them recently: the links of a simulation.

Only reference engines measure transfers, and they send KV while they compute (`overlap`). The duration of such a
transfer says more about its prefill than about the link, so the measured bandwidth of links is used first. The time
for which a daemon held it says nothing of the link.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from statistics import median
from typing import Any

from controller.flow.gate import OFF
from controller.models import InstanceLink
from controller.selectors.experiments.policy_today import flow_policy_today
from controller.selectors.fleet.links import kv_transfers

WINDOW = timedelta(days=1)
NEWEST = 200  # transfers that are read
GIGA = 1e9
SCHEDULED = "scheduled"  # what an engine says of a transfer that its host's daemon scheduled


@dataclass(frozen=True, slots=True)
class KvToday:
    """Medians over the newest transfers that arrived: bytes per prompt token, and layers. `gb_s`: 1e9 bytes/s of one of
    `links` now or, if none is measured, of one transfer. `flow_policy`: by which transfer daemons schedule them, OFF if
    none does."""

    gb_s: float
    bytes_per_token: int
    layers: int
    transfers: int
    links: int
    flow_policy: str = OFF

    @property
    def note(self) -> str:
        last = f"the last {self.transfers:,} transfers"
        order = "" if self.flow_policy == OFF else f"; the flow policy is {self.flow_policy}"
        speed = f"KV moves at {self.gb_s:.3g} GB/s"
        size = f"{self.bytes_per_token:,} bytes a token"
        if not self.links:
            return f"{speed}, {size}: the medians of {last}{order}."
        return f"{speed}, the median of {self.links:,} links; {size}, that of {last}{order}."

    @property
    def settings(self) -> dict[str, Any]:
        """The `links` settings of a simulation."""
        found = {"bandwidth_gb_s": self.gb_s, "overlap": True, "layers": self.layers}
        return found if self.flow_policy == OFF else found | {"flow_policy": self.flow_policy}


NOT_MEASURED = "No KV transfer is on record: links and KV sizes are the simulator's defaults."


def kv_today(model: str, now: datetime) -> KvToday | None:
    """None if no engine measured a transfer of this model recently. At most three queries."""
    rows = kv_transfers(model=model, outcome="done", since=now - WINDOW)
    measured = rows.filter(measured_by="engine", bytes__gt=0, seconds__gt=0, tokens__gt=0)
    figures = measured.values_list("bytes", "seconds", "held_s", "tokens", "layers", "flow")[:NEWEST]
    found = [
        (size, seconds - held_s, tokens, layers or 1, flow)
        for size, seconds, held_s, tokens, layers, flow in figures
        if size and seconds and tokens and seconds > held_s
    ]
    if not found:
        return None
    links = InstanceLink.objects.filter(model=model, closed_at__isnull=True, bandwidth_bytes_s__gt=0)
    measured_now = [speed for speed in links.values_list("bandwidth_bytes_s", flat=True) if speed]
    speed = median(measured_now or [size / seconds for size, seconds, *_ in found])
    per_token = median(size / tokens for size, _, tokens, *_ in found)
    layers = round(median(layers for *_, layers, _ in found))
    scheduled = any(flow == SCHEDULED for *_, flow in found)
    policy = flow_policy_today() if scheduled else OFF
    return KvToday(speed / GIGA, max(1, round(per_token)), max(1, layers), len(found), len(measured_now), policy)


def disaggregated(instances: Any) -> bool:
    """Whether a simulator's JSON has prefill and decode instances."""
    groups = instances if isinstance(instances, list) else [instances]
    roles = (group.get("role") for group in groups if isinstance(group, Mapping))
    return any(role in ("prefill", "decode") for role in roles)
