"""The part of *Flows* about pruning: what the coordinator does now, and what became of the requests that it pruned."""

from __future__ import annotations

import time
from typing import Any

from django.utils import timezone

from console.live.ttl_cache import TtlCache
from controller.core.pruning import PruningOrders
from controller.models import FlowSettings
from controller.selectors.records.pruned import WINDOW, PrunedLately, pruned_lately
from workers import live
from workers.pruning import read_orders
from workers.tasks.names import PRUNING_PROCESS

SILENT_S = 5.0  # the coordinator sends a heartbeat each second
KEPT_S = 5.0  # the records of ten minutes are read for all pages together

LATELY: TtlCache[PrunedLately] = TtlCache(KEPT_S)


def pruning_context(stored: FlowSettings | None) -> dict[str, Any]:
    """`state`: off, away (Redis cannot be read), silent (the coordinator does not run) or on."""
    budget = 0.0 if stored is None else stored.drop_budget
    found: dict[str, Any] = {"budget": budget, "minutes": round(WINDOW.total_seconds() / 60)}
    if not budget:
        return found | {"state": "off"}
    found["lately"] = LATELY.get(lambda: pruned_lately(timezone.now()))
    try:
        orders = live.run(read_orders())
        heard_at = live.read_heartbeats((PRUNING_PROCESS,)).get(PRUNING_PROCESS)
    except live.LiveUnavailable:
        return found | {"state": "away"}
    if heard_at is None or time.time() - heard_at > SILENT_S:
        return found | {"state": "silent", "heard_at": heard_at}
    return found | {"state": "on", "orders": _in_force(orders)}


def _in_force(orders: PruningOrders | None) -> dict[str, Any]:
    if orders is None:
        return {"pruned": 0}
    return {"pruned": len(orders.scavengers), "waiting": orders.waiting, "gateways": len(orders.gateways)}
