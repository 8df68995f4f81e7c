"""KV transfers: one decode stage each, from the sending of its prefill to its end, and all of them by state.

`DecodeTransfer` is what the migrator remembers of one, and `TransferQueue` says who waits, in which order, and whose KV
is under way.

Waiting stages are kept by model (`Line`) and kind (`Group`). Two requests of one kind can go to the same instances over
the same links: what a pass finds out about one holds for all of its kind, so a kind that waits for an instance or a
link is left as a whole. A pass therefore costs as much as what it looks at, not as what waits.
"""

from __future__ import annotations

import heapq
import math
from bisect import bisect_left, insort
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain, islice
from typing import NamedTuple

from controller.core.types import Request
from controller.dispatch.disaggregation.migrator_config import MigratorConfig
from controller.dispatch.disaggregation.paired_prefills import PairedPrefills
from controller.dispatch.disaggregation.placements import Order, Prefilled
from controller.dispatch.lifecycle import LANDED, MAX_PREFILLS, UNDER_WAY, Followed, State, after

# Source, a pair or not, and which contexts of the model's instances hold the prompt, and prompt and answer. Instances
# that failed a request make no difference: one with only such left waits for room as well.
Kind = tuple[str, bool, tuple[int, int]]
CHOSEN: Kind = ("", False, (0, 0))  # their instance was chosen when their prefill was sent
ALIKE = (0, 0)  # all contexts are of one length
PRESSURE_ROWS = 16  # of each kind: those that are due first

UNEXPLAINED = "transfer_failed"  # its engine does not say whether the KV, the link or itself is at fault


class DecodeTransfer(Followed):
    """The decode stage of one request: what the migrator knows beyond the scheduler's `OpenRequest`. After each pass
    both are in the same state; within a pass the migrator follows later. `target` is set once it is placed; `since` is
    when its state began."""

    __slots__ = (
        "assumed",
        "due",
        "early",
        "excluded",
        "failures",
        "group",
        "hopeless",
        "incompatible",
        "kv_tokens",
        "not_before",
        "order",
        "overdue_at",
        "paired",
        "placed_at",
        "prefill_s",
        "pruned",
        "rank",
        "since",
        "source",
        "source_busy_s",
        "stage",
        "target",
        "turn_at",
        "turned_away",
    )

    def __init__(self, request: Request, source: str, now: float, prefill_s: float = 0.0, paired: bool = False) -> None:
        super().__init__(State.PREFILLING)
        self.stage = Prefilled(request, now)
        self.source = source
        self.target = ""
        self.rank = 0
        self.since = now
        self.kv_tokens = 0
        self.prefill_s, self.paired = prefill_s, paired  # a pair's prefill begins when its decode stage is placed
        self.due = now + prefill_s  # when its first token was expected, at the sending of its prefill
        self.overdue_at = math.inf  # a prefill that has not ended by then is rolled back
        self.early = False  # its prefill has not ended, but it may be placed
        self.source_busy_s = 0.0  # of a pair: what its prefill instance had computed when it was sent there
        self.assumed = False  # committed, but no engine reported it
        self.failures = 0
        self.hopeless = False  # placed only when no other waits
        self.pruned = False  # by orders: transfer daemons send its KV after that of others
        self.not_before = -math.inf
        self.excluded: set[str] = set()  # decode instances that failed it: tried again only if there is no other
        self.incompatible = False  # in the last pass all decode instances were incompatible with its source
        self.group: Group | None = None  # of its kind, while it waits and is not tried later
        self.order: Order = (0.0, 0.0, "")  # in that group
        self.placed_at = -math.inf  # when its decode instance was chosen last
        self.turn_at = math.inf  # when something is due for it by time alone
        self.turned_away = False  # by an engine without room; some then tell the prefill engine to free its KV

    @property
    def request(self) -> Request:
        return self.stage.request

    @property
    def forced(self) -> bool:
        """Whether an operator wants it sent whatever its chances."""
        return self.request.order < 0

    @property
    def landed(self) -> bool:
        return self.state in LANDED

    @property
    def kv_has_left(self) -> bool:
        """Only its decode instance has its KV. The prefill instance of a pair keeps none once it has ended."""
        if self.paired and not self.early and self.state in UNDER_WAY:
            return True
        return self.landed and not self.assumed

    @property
    def kv_is_kept(self) -> bool:
        """Its prompt has been computed, and its prefill instance keeps the KV for a decode instance."""
        if self.state is State.COMMITTED:
            return self.assumed
        return self.state in (State.WAITING, *UNDER_WAY) and not self.prefilling

    @property
    def prefilling(self) -> bool:
        """Its prefill has not ended, and its KV is not at a decode instance."""
        return self.state is State.PREFILLING or (self.early and not self.landed)

    def kv_is_lost(self, reason: str) -> bool:
        """The engine says so, or an engine that gives no reason fails it after it was turned away, or a second time.

        On its last prefill a second failure is not enough, since the KV could not be computed again.
        """
        if reason == UNEXPLAINED:
            return self.turned_away or (self.failures > 0 and self.request.attempts + 1 < MAX_PREFILLS)
        return reason == "kv_lost"

    def begin_early(self, first_at: float) -> None:
        """Let it be placed before its prefill has ended; the first token is expected at `first_at`."""
        self.early, self.stage, self.kv_tokens = True, Prefilled(self.request, first_at), self.request.prompt_tokens

    @property
    def pair_computes(self) -> bool:
        """It is a pair with both stages sent, whose prefill has not ended."""
        return self.paired and self.early and self.state in UNDER_WAY

    def pressure(self, prefills: PairedPrefills, now: float) -> float:
        """Its wait for a decode instance over what was left of its TTFT. One that is still computed waits for none; a
        pair waits for one whenever its prefill instance, which waits with it, is idle."""
        if not self.early:
            return self.stage.wait_over_slo(now)
        if not self.paired:
            return 0.0
        sent_at, busy_s = self.due - self.prefill_s, prefills.seconds(self.source, now) - self.source_busy_s
        return self.stage.over_slo(now - sent_at - busy_s)


Entry = tuple[Order, DecodeTransfer]


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
        """Whether any waits that may be placed now."""
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

    def pressure(self, prefills: PairedPrefills, now: float) -> float:
        """The largest of their waits over what was left of their TTFT: of each kind's first ones and of its oldest."""
        looked_at: list[DecodeTransfer] = list(islice(self.resting.values(), PRESSURE_ROWS))
        for group in chain(self.ready.groups.values(), self.late.groups.values()):
            looked_at += (transfer for _, transfer in islice(group.entries, PRESSURE_ROWS))
            looked_at += islice(group.since.values(), 1)
        return max((transfer.pressure(prefills, now) for transfer in looked_at), default=0.0)

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


class TransferQueue:
    """All transfers, by request id and by state.

    `lines`: those that wait for a decode instance, by model and in the placement's order, which must not change while a
    transfer waits. `moving`: those with a decode instance whose KV has not arrived there. What is due by time alone is
    known without looking at all of them (`due`).
    """

    def __init__(self, order: Callable[[Prefilled], Order], config: MigratorConfig) -> None:
        self._order = order
        self.config = config
        self._all: dict[str, DecodeTransfer] = {}
        self._turns: list[tuple[float, int, DecodeTransfer]] = []  # heap by `turn_at`; old entries leave at its top
        self._serial = 0
        self.lines: dict[str, Line] = {}
        self.moving: dict[str, DecodeTransfer] = {}
        self.prefills = PairedPrefills()
        self.now = 0.0  # of the pass

    def __len__(self) -> int:
        return len(self._all)

    def __iter__(self) -> Iterator[DecodeTransfer]:
        return iter(list(self._all.values()))

    def get(self, request_id: str) -> DecodeTransfer | None:
        return self._all.get(request_id)

    def prune(self, request_id: str, pruned: bool, now: float) -> DecodeTransfer | None:
        """Note that orders name it, or do not any more. None if that changes nothing: its KV has arrived, or an
        operator forced the request."""
        transfer = self._all.get(request_id)
        if transfer is None or transfer.pruned == pruned or (pruned and transfer.forced):
            return None
        transfer.pruned = pruned and not transfer.landed
        return None if transfer.landed else transfer

    @property
    def waiting(self) -> int:
        """How many wait for a decode instance."""
        return sum(len(line) for line in self.lines.values())

    def under_way(self, transfer: DecodeTransfer) -> bool:
        """Whether it has neither ended, nor started over, nor landed."""
        return self._all.get(transfer.request.id) is transfer and not transfer.landed

    def add(self, transfer: DecodeTransfer) -> None:
        self._all[transfer.request.id] = transfer
        if transfer.paired:
            transfer.source_busy_s = self.prefills.seconds(transfer.source, self.now)

    def pop(self, request_id: str) -> DecodeTransfer | None:
        transfer = self._all.pop(request_id, None)
        if transfer is not None:
            self._leave(transfer)
        return transfer

    def advance(self, transfer: DecodeTransfer, on: str, now: float) -> bool:
        """To the state that `on` leads to (lifecycle.STEPS). False, and no change, where `on` does not apply."""
        if after(transfer.state, on) is None:
            return False
        self._leave(transfer)
        transfer.follow(on)
        transfer.since = now
        self._enter(transfer, now)
        return True

    def prefill_ended(self, transfer: DecodeTransfer, now: float) -> None:
        """Of one that was placed, or waits, since before: from now on the time-outs of the transfer count."""
        self._leave(transfer)
        transfer.early, transfer.since = False, max(transfer.since, now)
        transfer.stage = Prefilled(transfer.request, now)
        self._enter(transfer, now)

    def turn_hopeless(self, transfer: DecodeTransfer, now: float) -> None:
        self._leave(transfer)
        transfer.hopeless = True
        self._enter(transfer, now)

    def pressure(self, now: float) -> dict[str, tuple[int, float]]:
        """By model: how many wait, those included that are late, and the largest of their waits for a decode instance
        over what the prefill left of their TTFT targets."""
        lines = [(model, line) for model, line in self.lines.items() if len(line)]
        return {model: (len(line), line.pressure(self.prefills, now)) for model, line in lines}

    # ---- whom to look at -------------------------------------------------------------------------------------------

    def changed(self, model: str) -> None:
        """Something happened that may make room for its waiting stages, or open a way to it."""
        line = self.lines.get(model)
        if line is not None:
            line.changed = True

    def context_lengths(self, model: str, lengths: Iterable[int], now: float) -> None:
        """The contexts of its instances changed, and so may the kinds of what waits."""
        ordered = sorted(set(lengths))
        line = self._line(model)
        line.changed = True
        if ordered == line.lengths:
            return
        waiting = list(line)
        for transfer in waiting:
            line.remove(transfer)
        line.lengths = ordered
        for transfer in sorted(waiting, key=lambda each: each.since):
            self._wait(transfer, now)

    def to_look_at(self, now: float) -> list[tuple[str, Line]]:
        """Models for which something changed, and those that were not looked at for a while."""
        for_s = self.config.retry_s
        lines = [item for item in self.lines.items() if item[1].tries]
        return [(model, line) for model, line in lines if line.changed or now >= line.looked_at + for_s]

    def found_incompatible(self, transfer: DecodeTransfer, now: float) -> None:
        """What was found out about one holds for all of its kind, and says how long they wait."""
        group = transfer.group
        if group is None or group.incompatible is transfer.incompatible:
            return
        group.incompatible = transfer.incompatible
        for each in group.since.values():
            each.incompatible = group.incompatible
            self._schedule(each, now)

    # ---- what is due by time alone ---------------------------------------------------------------------------------

    def due(self, now: float) -> Iterator[DecodeTransfer]:
        """Those for which a time-out, a retry or the end of a wait is due, each once."""
        while self.next_turn() <= now:
            transfer = heapq.heappop(self._turns)[2]
            transfer.turn_at = math.inf
            yield transfer
            if transfer.state is State.WAITING and self.under_way(transfer) and transfer.turn_at == math.inf:
                self._wake(transfer, now)

    def next_turn(self) -> float:
        while self._turns:
            at, _, transfer = self._turns[0]
            if transfer.turn_at == at and self._all.get(transfer.request.id) is transfer:
                return at
            heapq.heappop(self._turns)
        return math.inf

    def limit_s(self, transfer: DecodeTransfer) -> float:
        """How long its present state may last once it is placed."""
        if transfer.state is State.PLACED:
            return self.config.placed_timeout_s
        if transfer.state is State.RESERVED:
            return self.config.reserved_timeout_s
        return math.inf if transfer.early else self.config.moving_timeout_s  # early: its prefill's time-out counts

    def waits_until(self, transfer: DecodeTransfer) -> float:
        """Counted from its first token, however often it found no room since."""
        return transfer.stage.first_at + self.config.waiting_timeout_s

    def most_s(self, transfer: DecodeTransfer) -> float:
        """Seconds until a request that waits for an instance is given up: fewer with incompatible peers only."""
        config = self.config
        return min(config.incompatible_hold_s, config.hold_s) if transfer.incompatible else config.hold_s

    def hold_s(self, transfer: DecodeTransfer) -> float:
        """The same for this request: no longer than it would have waited for a prefill instance."""
        return min(self.most_s(transfer), transfer.request.targets.waiting_time_s)

    def _wake(self, transfer: DecodeTransfer, now: float) -> None:
        line = self._line(transfer.request.model)
        line.changed = True
        if transfer.group is None and transfer.not_before <= now:
            line.resting.pop(transfer.request.id, None)
            self._wait(transfer, now)
            return
        self._schedule(transfer, now)

    def _schedule(self, transfer: DecodeTransfer, now: float) -> None:
        transfer.turn_at = at = self._turn(transfer, now)
        if at < math.inf:
            self._serial += 1
            heapq.heappush(self._turns, (at, self._serial, transfer))
        if len(self._turns) > 2 * len(self._all) + 64:
            self._turns = [item for item in self._turns if item[2].turn_at == item[0] and self.under_way(item[2])]
            heapq.heapify(self._turns)

    def _turn(self, transfer: DecodeTransfer, now: float) -> float:
        if transfer.state is not State.WAITING:
            return transfer.since + self.limit_s(transfer)
        group, may_wait_until = transfer.group, transfer.since + self.hold_s(transfer)
        if group is not None and may_wait_until <= now:
            group.due[transfer.request.id] = transfer
        turns = (transfer.not_before, may_wait_until, transfer.since + self.most_s(transfer))
        return min((self.waits_until(transfer), *(turn for turn in turns if turn > now)))

    # ---- states ----------------------------------------------------------------------------------------------------

    def _enter(self, transfer: DecodeTransfer, now: float) -> None:
        if transfer.state is State.WAITING:
            self._wait(transfer, now)
        elif transfer.state in UNDER_WAY:
            self.moving[transfer.request.id] = transfer
            self._schedule(transfer, now)
            if transfer.pair_computes:
                self.prefills.begins(transfer.source, now)

    def _wait(self, transfer: DecodeTransfer, now: float) -> None:
        line = self._line(transfer.request.model)
        line.changed = True
        if transfer.not_before > now:
            line.resting[transfer.request.id] = transfer
        else:
            line.add(transfer, self._order(transfer.stage))
        self._schedule(transfer, now)

    def _leave(self, transfer: DecodeTransfer) -> None:
        transfer.turn_at = math.inf
        if transfer.pair_computes and transfer.request.id in self.moving:
            self.prefills.ends(transfer.source, self.now)
        self.moving.pop(transfer.request.id, None)
        if transfer.state is State.WAITING:
            self._line(transfer.request.model).remove(transfer)

    def _line(self, model: str) -> Line:
        line = self.lines.get(model)
        if line is None:
            line = self.lines[model] = Line()
        return line
