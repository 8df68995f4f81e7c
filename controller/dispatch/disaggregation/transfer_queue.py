"""Decode stages by state: who waits, in which order, and whose KV is under way."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Iterator

from controller.dispatch.disaggregation.placements import Order, Prefilled
from controller.dispatch.disaggregation.transfers import Transfer
from controller.dispatch.lifecycle import UNDER_WAY, State, after

Entry = tuple[Order, Transfer]


class TransferQueue:
    """Transfers by request id. `waiting` and `hopeless` (those that wait for all others) are in the placement's order,
    which must not change while a transfer is in them; `moving` are those that an instance
    was chosen for and whose KV is not there yet."""

    def __init__(self, order: Callable[[Prefilled], Order]) -> None:
        self._order = order
        self._all: dict[str, Transfer] = {}
        self.waiting: list[Entry] = []
        self.hopeless: list[Entry] = []
        self.moving: dict[str, Transfer] = {}

    def __len__(self) -> int:
        return len(self._all)

    def __iter__(self) -> Iterator[Transfer]:
        return iter(list(self._all.values()))

    def get(self, request_id: str) -> Transfer | None:
        return self._all.get(request_id)

    def under_way(self, transfer: Transfer) -> bool:
        """Has it neither ended, begun anew nor landed?"""
        return self._all.get(transfer.request.id) is transfer and not transfer.landed

    def add(self, transfer: Transfer) -> None:
        self._all[transfer.request.id] = transfer

    def pop(self, request_id: str) -> Transfer | None:
        transfer = self._all.pop(request_id, None)
        if transfer is not None:
            self._leave(transfer)
        return transfer

    def advance(self, transfer: Transfer, on: str, now: float) -> bool:
        """To the state that `on` leads to (lifecycle.STEPS). False where that does not apply: nothing changes."""
        state = after(transfer.state, on)
        if state is None:
            return False
        self._leave(transfer)
        transfer.state, transfer.since = state, now
        self._enter(transfer)
        return True

    def starts_at(self, transfer: Transfer, first_at: float) -> None:
        """Its first token came, or is expected, at `first_at`."""
        self._leave(transfer)
        transfer.stage = Prefilled(transfer.request, first_at)
        self._enter(transfer)

    def turn_hopeless(self, transfer: Transfer) -> None:
        self._leave(transfer)
        transfer.hopeless = True
        self._enter(transfer)

    def pressure(self, now: float) -> dict[str, tuple[int, float]]:
        """By model: how many wait that can still make it, and their largest wait since the first token over TPOT."""
        found: dict[str, tuple[int, float]] = {}
        for _, transfer in self.waiting:
            tpot_s = transfer.request.targets.tpot_s
            count, longest = found.get(transfer.request.model, (0, 0.0))
            wait = (now - transfer.since) / tpot_s if tpot_s > 0 and not transfer.early else 0.0
            found[transfer.request.model] = (count + 1, max(longest, wait))
        return found

    def _enter(self, transfer: Transfer) -> None:
        if transfer.state is State.WAITING:
            insort(self._queue(transfer), (self._order(transfer.stage), transfer), key=_order)
        elif transfer.state in UNDER_WAY:
            self.moving[transfer.request.id] = transfer

    def _leave(self, transfer: Transfer) -> None:
        self.moving.pop(transfer.request.id, None)
        if transfer.state is State.WAITING:
            queue = self._queue(transfer)
            del queue[bisect_left(queue, self._order(transfer.stage), key=_order)]

    def _queue(self, transfer: Transfer) -> list[Entry]:
        return self.hopeless if transfer.hopeless else self.waiting


def _order(entry: Entry) -> Order:
    return entry[0]
