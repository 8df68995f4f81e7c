"""The part of *Flows* about pruning: what the coordinator does now, and what became of the requests that it pruned."""

from __future__ import annotations

import time
from typing import Any

from django.utils import timezone

from console.live.polled import fleet_now
from console.live.ttl_cache import TtlCache
from controller.core.pruning import PruningOrders
from controller.models import FlowSettings
from controller.selectors.records.pruned import WINDOW, PrunedLately, pruned_lately
from workers import live
from workers.pruning import read_orders
from workers.tasks.names import PRUNING_PROCESS

SILENT_S = 5.0  # the coordinator sends a heartbeat each second
IGNORED = ("late", "out_of_sequence")  # keys of FleetMessage.pruning_orders
KEPT_S = 5.0  # the records of ten minutes are read for all pages together

LATELY: TtlCache[PrunedLately] = TtlCache(KEPT_S)


def pruning_context(stored: FlowSettings | None) -> dict[str, Any]:
    """`state`: off, away (Redis cannot be read), silent (the coordinator does not run) or on."""
    budget = 0.0 if stored is None else stored.drop_budget
    found: dict[str, Any] = {"budget": budget, "minutes": round(WINDOW.total_seconds() / 60)}
    if not budget:
        return found | {"state": "off"}
    found |= {"lately": LATELY.get(lambda: pruned_lately(timezone.now())), "ignored": _ignored()}
    try:
        orders = live.run(read_orders())
        heard_at = live.read_heartbeats((PRUNING_PROCESS,)).get(PRUNING_PROCESS)
    except live.LiveUnavailable:
        return found | {"state": "away"}
    if heard_at is None or time.time() - heard_at > SILENT_S:
        return found | {"state": "silent", "heard_at": heard_at}
    return found | {"state": "on", "orders": _in_force(orders)}


def _ignored() -> list[dict[str, Any]]:
    """The gateways to which orders came too late or out of sequence since they started, with how many."""
    counted = [(fleet["gateway"], fleet.get("pruning_orders", {})) for fleet in fleet_now().fleets]
    rows = [{"gateway": name} | {why: counts.get(why, 0) for why in IGNORED} for name, counts in sorted(counted)]
    return [row for row in rows if any(row[why] for why in IGNORED)]


def _in_force(orders: PruningOrders | None) -> dict[str, Any]:
    if orders is None:
        return {"pruned": 0}
    return {"pruned": len(orders.scavengers), "waiting": orders.waiting, "gateways": len(orders.gateways)}
