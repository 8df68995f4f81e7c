"""One FleetObservation of a model and role, from what gateways publish and from the instances in the database.

Rates, waits and queue are those of the model (FleetMessage.models), added up over gateways. Where prefill and decode
are disaggregated they are those of the stage, since requests that prefill cannot accept are no demand for decode.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from controller.core.messages import FleetMessage, InstanceMessage
from controller.core.staleness import STALE_PERIODS
from controller.scale.load import FleetObservation, Member, processing_rate
from controller.scale.traffic import NO_TRAFFIC, stage_traffic

# Observed states that are no capacity, and nothing to wait for.
NO_CAPACITY = ("unhealthy", "unreachable", "lost", "failed", "stopped")


class InstanceRow(NamedTuple):
    """A live instance as the database knows it. `fixed`: run by somebody else, so not ours to start or stop;
    `takes_both_roles`: it can serve the other stage too, whoever runs it."""

    id: str
    desired: str
    observed: str
    fixed: bool
    takes_both_roles: bool = True


def fresh(messages: Iterable[FleetMessage], now: float) -> list[FleetMessage]:
    """The messages that are not stale: at most three of their periods old. `now` and `at`: epoch seconds."""
    return [m for m in messages if now - m["at"] <= STALE_PERIODS * m["period_s"]]


def outstanding(messages: Sequence[FleetMessage]) -> dict[str, int]:
    """Requests that run or wait at each instance or whose KV it still keeps, summed over gateways, by instance id."""
    total: dict[str, int] = {}
    for message in messages:
        for item in message["instances"]:
            total[item["id"]] = total.get(item["id"], 0) + item["running"] + item["waiting"] + item.get("kept_kv", 0)
    return total


def wanted_by_requests(messages: Iterable[FleetMessage]) -> set[str]:
    """Ids of instances that left, and that recent requests of some gateway need."""
    return {name for message in messages for name in message.get("wanted", ())}


def observe(
    rows: Iterable[InstanceRow],
    messages: Sequence[FleetMessage],
    now: float,
    model: str,
    startable: bool = True,
    *,
    role: str = "collocated",
) -> FleetObservation:
    """The fleet of one model and role. Of several gateways, rates and queues are added up; of waits and utilisations
    the highest counts."""
    current = fresh(messages, now)
    seen = {item["id"]: item for item in _by_utilisation(current)}
    todo = outstanding(current)
    needed = {item["id"] for m in current for item in m["instances"] if item.get("needed")}
    traffic = [stage_traffic(m["models"].get(model, NO_TRAFFIC), role) for m in current]
    here = [row for row in rows if row.desired != "stopped" and row.observed not in NO_CAPACITY]
    members = tuple(_member(row, seen.get(row.id), todo.get(row.id, 0), row.id in needed) for row in here)
    look = FleetObservation(
        members=members,
        age_s=min((now - m["at"] for m in current or messages), default=None),
        period_s=max((m["period_s"] for m in current or messages), default=1.0),
        wait_over_slo=max((t["wait_over_slo"] for t in traffic), default=0.0),
        arrival_rate=sum(t["arrival_rate"] for t in traffic),
        queued=sum(t["queued"] for t in traffic),
        startable=startable,
        counted_s=min((m["counted_s"] for m in current if "counted_s" in m), default=None),
        taken=any(m.get("capacity", {}).get(model) in ("up", "undecoded") for m in current),
    )
    finished = sum(t["service_rate"] for t in traffic)
    return look.with_processing_rate(processing_rate(finished, look.mean_utilisation, look.queued, look.arrival_rate))


def _by_utilisation(messages: Sequence[FleetMessage]) -> list[InstanceMessage]:
    """In rising order, so that the last entry of an id is its highest."""
    return sorted((item for m in messages for item in m["instances"]), key=lambda item: item["utilisation"])


def _member(row: InstanceRow, seen: InstanceMessage | None, todo: int, needed: bool) -> Member:
    state = "draining" if row.desired == "draining" else "ready" if row.observed == "ready" else "starting"
    busy, speed = (seen["utilisation"], seen.get("speed", 0.0)) if seen else (0.0, 0.0)
    return Member(row.id, state, busy, todo, row.fixed, row.takes_both_roles, needed, speed)
