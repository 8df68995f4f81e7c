"""KV transfers: one decode stage each, from the sending of its prefill to its end, and all of them by state.

`Transfer` is what the migrator remembers of one, `TransferQueue` says who waits, in which order, and whose KV is under
way, and `MigratorConfig` bounds how long each state may last.
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from itertools import chain

from controller.core.errors import ConfigError
from controller.core.types import Request
from controller.dispatch.disaggregation.placements import Order, Prefilled
from controller.dispatch.lifecycle import LANDED, MAX_PREFILLS, UNDER_WAY, State, after

MIGRATION_RANKS = ("none", "tpot")
UNEXPLAINED = "transfer_failed"  # its engine does not say whether the KV, the link or itself is at fault


@dataclass(frozen=True, slots=True)
class MigratorConfig:
    """Settings of a migrator.

    Time-outs, one for each state (see State): `prefilling_timeout_s` counts from when the first token is expected,
    `waiting_timeout_s` from that token, the others from when the state began. `release_timeout_s`: until a prefill
    instance is told again to free KV, `release_tries` times in all.

    `retry_s`: before a request that found no room at an engine is placed again; doubled with each failure once all
    instances failed it. `max_failures`: failed transfers of one request before it is given up. `hold_s`: how long a
    request may wait for a placement. Then it goes wherever there is room, whatever its TPOT; without any decode
    instance it is given up, after its waiting time if that is less. Less than the lease for which engines keep KV
    (30 s).

    `strangers_hold_s`: the same where all decode instances are incompatible peers, which time does not mend: only long
    enough for one that is being started. `strangers_s`: how long two instances count as incompatible before one prefill
    tries again.

    `scan_limit`: a pass leaves a model's requests after this many that find no room. `engine_rank`: what the engine is
    told about urgency. `link_failures`: transfers that fail in a row until a link is closed, for `link_closed_s` at
    first. `link_patience_s` is how long
    - a request whose links are all down, and that cannot be prefilled elsewhere, waits before it is sent over any;
    - one that could be prefilled elsewhere waits for the result of another that tries its link;
    - a link stays closed to others while one tries it whose engine will report nothing.

    `overlap`: where prefill engines give out KV while they compute, a decode stage is placed when its prompt is nearly
    computed, so that its KV moves meanwhile. Without it, and at other engines, it is placed when the prefill has ended,
    as in HyperFlexis.
    """

    prefilling_timeout_s: float = 120.0
    waiting_timeout_s: float = 300.0
    placed_timeout_s: float = 5.0
    reserved_timeout_s: float = 10.0
    moving_timeout_s: float = 30.0
    release_timeout_s: float = 2.0
    release_tries: int = 3
    retry_s: float = 0.05
    max_failures: int = 6
    hold_s: float = 25.0
    strangers_hold_s: float = 3.0
    strangers_s: float = 60.0
    scan_limit: int = 16
    engine_rank: str = "tpot"
    link_failures: int = 3
    link_closed_s: float = 2.0
    link_patience_s: float = 2.0
    overlap: bool = True

    def __post_init__(self) -> None:
        for name in (each.name for each in fields(self) if each.name.endswith("_s")):
            if not getattr(self, name) > 0:
                raise ConfigError(f"{name} must be positive seconds", field=name)
        for name in ("max_failures", "scan_limit", "link_failures", "release_tries"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be at least 1", field=name)
        if self.strangers_s < self.strangers_hold_s:  # a waiting request would try the same engine again and again
            raise ConfigError("strangers_s must be at least strangers_hold_s", field="strangers_s")
        if self.engine_rank not in MIGRATION_RANKS:
            raise ConfigError(f"engine_rank must be one of {', '.join(MIGRATION_RANKS)}", field="engine_rank")


class DecodeTransfer:
    """The decode stage of one request. `target` is set once it is placed; `since` is when its state began."""

    __slots__ = (
        "assumed",
        "due",
        "early",
        "excluded",
        "failures",
        "hopeless",
        "incompatible",
        "kv_tokens",
        "not_before",
        "overdue_at",
        "paired",
        "prefill_s",
        "since",
        "source",
        "stage",
        "state",
        "target",
        "turned_away",
    )

    def __init__(self, request: Request, source: str, now: float, prefill_s: float = 0.0, paired: bool = False) -> None:
        self.stage = Prefilled(request, now)
        self.source = source
        self.target = ""
        self.state = State.PREFILLING
        self.since = now
        self.kv_tokens = 0
        self.prefill_s, self.paired = prefill_s, paired  # a pair's prefill begins when its decode stage is placed
        self.due = now + prefill_s  # when its first token was expected, at the sending of its prefill
        self.overdue_at = math.inf  # a prefill that has not ended by then is rolled back
        self.early = False  # its prefill has not ended, but it may be placed
        self.assumed = False  # committed, but no engine reported it
        self.failures = 0
        self.hopeless = False  # placed only when no other waits
        self.not_before = -math.inf
        self.excluded: set[str] = set()  # decode instances that failed it: tried again only if there is no other
        self.incompatible = False  # in the last pass all decode instances were incompatible with its source
        self.turned_away = False  # by an engine without room; some then tell the prefill engine to free its KV

    @property
    def request(self) -> Request:
        return self.stage.request

    @property
    def landed(self) -> bool:
        return self.state in LANDED

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


Entry = tuple[Order, DecodeTransfer]


class TransferQueue:
    """All transfers, by request id and by state.

    `waiting` and `hopeless` (placed only when no other waits) are in the placement's order, which must not change while
    a transfer is in them. `moving` are those with a decode instance whose KV has not arrived there.
    """

    def __init__(self, order: Callable[[Prefilled], Order]) -> None:
        self._order = order
        self._all: dict[str, DecodeTransfer] = {}
        self.waiting: list[Entry] = []
        self.hopeless: list[Entry] = []
        self.moving: dict[str, DecodeTransfer] = {}

    def __len__(self) -> int:
        return len(self._all)

    def __iter__(self) -> Iterator[DecodeTransfer]:
        return iter(list(self._all.values()))

    def get(self, request_id: str) -> DecodeTransfer | None:
        return self._all.get(request_id)

    def under_way(self, transfer: DecodeTransfer) -> bool:
        """Has it neither ended nor started over nor landed?"""
        return self._all.get(transfer.request.id) is transfer and not transfer.landed

    def add(self, transfer: DecodeTransfer) -> None:
        self._all[transfer.request.id] = transfer

    def pop(self, request_id: str) -> DecodeTransfer | None:
        transfer = self._all.pop(request_id, None)
        if transfer is not None:
            self._leave(transfer)
        return transfer

    def advance(self, transfer: DecodeTransfer, on: str, now: float) -> bool:
        """To the state that `on` leads to (lifecycle.STEPS). False, and no change, where `on` does not apply."""
        state = after(transfer.state, on)
        if state is None:
            return False
        self._leave(transfer)
        transfer.state, transfer.since = state, now
        self._enter(transfer)
        return True

    def starts_at(self, transfer: DecodeTransfer, first_at: float) -> None:
        """Its first token came, or is expected, at `first_at`."""
        self._leave(transfer)
        transfer.stage = Prefilled(transfer.request, first_at)
        self._enter(transfer)

    def turn_hopeless(self, transfer: DecodeTransfer) -> None:
        self._leave(transfer)
        transfer.hopeless = True
        self._enter(transfer)

    def pressure(self, now: float) -> dict[str, tuple[int, float]]:
        """By model: how many wait, those included that are late, and the largest of their waits since the prefill over
        what it left of their TTFT targets."""
        found: dict[str, tuple[int, float]] = {}
        for _, transfer in chain(self.waiting, self.hopeless):
            count, longest = found.get(transfer.request.model, (0, 0.0))
            found[transfer.request.model] = (count + 1, max(longest, transfer.stage.wait_over_slo(now)))
        return found

    def _enter(self, transfer: DecodeTransfer) -> None:
        if transfer.state is State.WAITING:
            insort(self._queue(transfer), (self._order(transfer.stage), transfer), key=_order)
        elif transfer.state in UNDER_WAY:
            self.moving[transfer.request.id] = transfer

    def _leave(self, transfer: DecodeTransfer) -> None:
        self.moving.pop(transfer.request.id, None)
        if transfer.state is State.WAITING:
            queue = self._queue(transfer)
            del queue[bisect_left(queue, self._order(transfer.stage), key=_order)]

    def _queue(self, transfer: DecodeTransfer) -> list[Entry]:
        return self.hopeless if transfer.hopeless else self.waiting


def _order(entry: Entry) -> Order:
    return entry[0]
