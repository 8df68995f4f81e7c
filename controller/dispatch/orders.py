"""Orders of the coordinator of pruning: which are in force, and what they change at a gateway.

Orders out of sequence or past their end change nothing. When those in force end without new ones, everything that was
pruned goes back to its place: the dispatcher goes on by its own policies.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

from controller.core import events as ev
from controller.core.decisions import Decision, Figure
from controller.core.pruning import OrdersInForce
from controller.core.types import Request


class Prunable(Protocol):
    """A request where it waits or moves."""

    @property
    def request(self) -> Request: ...

    @property
    def pruned(self) -> bool: ...


class Prunables(Protocol):
    """Requests that may be pruned: a queue, or transfers. `prune` returns the request if that changed anything."""

    def get(self, request_id: str, /) -> Prunable | None: ...

    def prune(self, request_id: str, pruned: bool, now: float, /) -> Prunable | None: ...


class OrderBook(OrdersInForce):
    """Those that one gateway enforces. `in_force`: whether pruning is coordinated now."""

    def __init__(self) -> None:
        super().__init__()
        self._pruned: set[str] = set()

    def take(self, orders: ev.Orders, places: Iterable[Prunables], now: float) -> list[ev.Prune]:
        """Put new orders into force."""
        if not self.admit(orders.sequence, orders.expires_at, now):
            return []
        actions: list[ev.Prune] = []
        places = list(places)
        for name in sorted(self._pruned - orders.scavengers.keys()):
            actions += self._move(places, name, False, "room_again", {}, now)
        for name in sorted(orders.scavengers):
            if name in self._pruned and _is_pruned(places, name):  # one that was sent and came back is not, any more
                continue
            instance, behind_s = orders.scavengers[name]
            figures: dict[str, Figure] = {"instance": instance, "behind_s": behind_s}
            actions += self._move(places, name, True, "others_in_time", figures, now)
        return actions

    def expire(self, places: Iterable[Prunables], now: float) -> list[ev.Prune]:
        """End orders whose time is over."""
        if not self.end_if_over(now):
            return []
        actions: list[ev.Prune] = []
        places = list(places)
        for name in sorted(self._pruned):
            actions += self._move(places, name, False, "orders_expired", {}, now)
        self._pruned.clear()
        return actions

    def _move(
        self, places: list[Prunables], name: str, pruned: bool, reason: str, figures: dict[str, Figure], now: float
    ) -> list[ev.Prune]:
        self._pruned.discard(name)
        for place in places:
            found = place.prune(name, pruned, now)
            if found is not None:
                if pruned:
                    self._pruned.add(name)
                kind = "prune" if pruned else "unprune"
                return [ev.Prune(found.request, Decision(kind, reason, name, now, figures))]
        return []


def _is_pruned(places: list[Prunables], name: str) -> bool:
    found = (place.get(name) for place in places)
    return any(each.pruned for each in found if each is not None)
