"""How KV moves between prefill and decode instances now, from transfers that engines measured: a simulation's links."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from statistics import median
from typing import Any

from controller.selectors.links import kv_transfers

WINDOW = timedelta(days=1)
NEWEST = 200  # transfers that are looked at
GIGA = 1e9


@dataclass(frozen=True, slots=True)
class KvToday:
    """Medians over the newest transfers that arrived: `gb_s` 1e9 bytes a second of one, bytes a token of its prompt."""

    gb_s: float
    bytes_per_token: int
    transfers: int

    @property
    def note(self) -> str:
        return (
            f"KV moves at {self.gb_s:.3g} GB/s, {self.bytes_per_token:,} bytes a token: the medians of the last "
            f"{self.transfers:,} transfers."
        )


NOT_MEASURED = "No KV transfer is on record: links and KV sizes are the simulator's defaults."


def kv_today(model: str, now: datetime) -> KvToday | None:
    """None: no engine measured a transfer of this model lately. One query."""
    rows = kv_transfers(model=model, outcome="done", since=now - WINDOW)
    measured = rows.filter(measured_by="engine", bytes__gt=0, seconds__gt=0, tokens__gt=0)
    found = list(measured.values_list("bytes", "seconds", "tokens")[:NEWEST])
    if not found:
        return None
    speed = median(size / seconds for size, seconds, _ in found)
    per_token = median(size / tokens for size, _, tokens in found)
    return KvToday(speed / GIGA, max(1, round(per_token)), len(found))


def apart(instances: Any) -> bool:
    """Some only prefill, others only decode, in a simulator's JSON."""
    groups = instances if isinstance(instances, list) else [instances]
    roles = (group.get("role") for group in groups if isinstance(group, Mapping))
    return any(role in ("prefill", "decode") for role in roles)
