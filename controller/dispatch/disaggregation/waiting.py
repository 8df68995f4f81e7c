"""The decode stages of one model that wait for a decode instance: by kind, in their placement's order.

Two requests of one kind can go to the same instances over the same links. What a pass finds out about one holds for all
of its kind, so a kind that waits for an instance or a link is left as a whole, however many there are. A pass therefore
costs as much as what it looks at, not as what waits.
"""

from __future__ import annotations

import heapq
import math
from bisect import bisect_left, insort
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from itertools import chain, islice
from typing import TYPE_CHECKING, NamedTuple

from controller.core.types import Request
from controller.dispatch.disaggregation.placements import Order

if TYPE_CHECKING:
    from controller.dispatch.disaggregation.transfers import DecodeTransfer

# Source, a pair or not, and which contexts of the model's instances hold the prompt, and prompt and answer. Instances
# that failed a request make no difference: one with only such left waits for room as well.
Kind = tuple[str, bool, tuple[int, int]]
CHOSEN: Kind = ("", False, (0, 0))  # their instance was chosen when their prefill was sent
ALIKE = (0, 0)  # all contexts are of one length
PRESSURE_ROWS = 16  # of each kind: those that are due first

Entry = tuple[Order, "DecodeTransfer"]


class Stuck(NamedTuple):
    """Room would not help this kind. One that has waited for `for_s` is looked at all the same, and, where it does not
    compete with others for an instance, one that has waited for as long as it may, so that it ends by being given up.
    """

    for_s: float
    competes: bool


class Group:
    """The waiting stages of one kind. `due`: those that have waited for as long as they may."""

    __slots__ = ("due", "entries", "incompatible", "kind", "since")

    def __init__(self, kind: Kind) -> None:
        self.kind = kind
        self.entries: list[Entry] = []
        self.since: OrderedDict[str, DecodeTransfer] = OrderedDict()  # the one that has waited the longest first
        self.due: dict[str, DecodeTransfer] = {}
        self.incompatible = False  # all decode instances were incompatible with their source when last looked at

    def add(self, order: Order, transfer: DecodeTransfer) -> None:
        insort(self.entries, (order, transfer), key=_order)
        self.since[transfer.request.id] = transfer

    def remove(self, transfer: DecodeTransfer) -> None:
        del self.entries[bisect_left(self.entries, transfer.order, key=_order)]
        del self.since[transfer.request.id]
        self.due.pop(transfer.request.id, None)

    def after(self, order: Order) -> Entry | None:
        """The next one behind this place in the order, whether anybody is at that place or not."""
        index = bisect_left(self.entries, order, key=_order)
        if index < len(self.entries) and self.entries[index][0] == order:
            index += 1
        return self.entries[index] if index < len(self.entries) else None

    def looked_at_anyway(self, stuck: Stuck, now: float) -> list[Entry]:
        """In order."""
        found: list[DecodeTransfer] = []
        if stuck.competes:
            for transfer in self.since.values():
                if now - transfer.since < stuck.for_s:
                    break
                found.append(transfer)
        else:
            found = [
                t for t in self.due.values() if now - t.since >= min(stuck.for_s, t.request.targets.waiting_time_s)
            ]
        return sorted(((transfer.order, transfer) for transfer in found), key=_order)


class Tier:
    """Waiting stages that are looked at in one order."""

    def __init__(self) -> None:
        self.groups: dict[Kind, Group] = {}

    def __len__(self) -> int:
        return sum(len(group.entries) for group in self.groups.values())

    def group(self, kind: Kind) -> Group:
        found = self.groups.get(kind)
        if found is None:
            found = self.groups[kind] = Group(kind)
        return found

    def leave(self, group: Group) -> None:
        """A kind that nobody is of any more is forgotten."""
        if not group.entries:
            self.groups.pop(group.kind, None)

    def scan(self) -> Scan:
        return Scan(list(self.groups.values()))


class Scan:
    """Goes through the groups of a tier in the common order, while stages leave them."""

    def __init__(self, groups: Sequence[Group]) -> None:
        self._serials = {id(group): serial for serial, group in enumerate(groups)}
        self._rest: dict[int, Iterator[Entry]] = {}  # of kinds that are stuck
        self._heads: list[tuple[Order, int, Group, DecodeTransfer]] = []
        self._only_chosen = False
        for group in groups:
            if group.entries:
                self._push(group, group.entries[0])

    def next(self) -> tuple[Group, DecodeTransfer] | None:
        while self._heads:
            _, _, group, transfer = heapq.heappop(self._heads)
            if self._only_chosen and group.kind is not CHOSEN:
                continue
            return group, transfer
        return None

    def on(self, group: Group, order: Order) -> None:
        """Look at the next one of this group behind that place."""
        rest = self._rest.get(id(group))
        entry = group.after(order) if rest is None else next((each for each in rest if each[0] > order), None)
        if entry is not None:
            self._push(group, entry)

    def stick(self, group: Group, stuck: Stuck, now: float) -> None:
        """Of this group look only at those that are looked at in any case."""
        self._rest[id(group)] = iter(group.looked_at_anyway(stuck, now))

    def only_chosen(self) -> None:
        self._only_chosen = True

    def _push(self, group: Group, entry: Entry) -> None:
        heapq.heappush(self._heads, (entry[0], self._serials[id(group)], group, entry[1]))


class Line:
    """What waits of one model. `resting`: tried again later. `lengths`: contexts of the model's instances, sorted.

    `changed`: something happened since it was looked at last; `looked_at`: when that was; `polls_at`: when a decode
    step ends that may make room.
    """

    def __init__(self) -> None:
        self.ready = Tier()
        self.late = Tier()
        self.resting: dict[str, DecodeTransfer] = {}
        self.lengths: list[int] = []
        self.changed = True
        self.looked_at = -math.inf
        self.polls_at = math.inf

    def __len__(self) -> int:
        return len(self.ready) + len(self.late) + len(self.resting)

    @property
    def tries(self) -> bool:
        """Does one wait that is not tried later?"""
        return bool(self.ready.groups or self.late.groups)

    def __iter__(self) -> Iterator[DecodeTransfer]:
        for group in (*self.ready.groups.values(), *self.late.groups.values()):
            yield from [transfer for _, transfer in group.entries]
        yield from list(self.resting.values())

    def add(self, transfer: DecodeTransfer, order: Order) -> None:
        tier = self.late if transfer.hopeless else self.ready
        group = tier.group(self._kind(transfer))
        group.add(order, transfer)
        transfer.group, transfer.order = group, order
        transfer.incompatible = group.incompatible

    def remove(self, transfer: DecodeTransfer) -> None:
        group = transfer.group
        if group is None:
            self.resting.pop(transfer.request.id, None)
            return
        transfer.group = None
        group.remove(transfer)
        (self.late if transfer.hopeless else self.ready).leave(group)

    def pressure(self, now: float) -> float:
        """The largest of their waits over what was left of their TTFT: of each kind's first ones and of its oldest."""
        looked_at: list[DecodeTransfer] = list(islice(self.resting.values(), PRESSURE_ROWS))
        for group in chain(self.ready.groups.values(), self.late.groups.values()):
            looked_at += (transfer for _, transfer in islice(group.entries, PRESSURE_ROWS))
            looked_at += islice(group.since.values(), 1)
        return max((t.stage.wait_over_slo(now) for t in looked_at if not t.early), default=0.0)  # early: not prefilled

    def _kind(self, transfer: DecodeTransfer) -> Kind:
        if transfer.target:
            return CHOSEN
        contexts = _held_by(self.lengths, transfer.request) if len(self.lengths) > 1 else ALIKE
        return transfer.source, transfer.paired, contexts


def _held_by(lengths: list[int], request: Request) -> tuple[int, int]:
    tokens = request.prompt_tokens
    return bisect_left(lengths, tokens + 1), bisect_left(lengths, tokens + (request.max_tokens or 1))


def _order(entry: Entry) -> Order:
    return entry[0]
