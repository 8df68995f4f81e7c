"""Order of batches and pruning of what cannot be in time (MFS sec. 4.4.2, App. B, Alg. 1; worked examples M4, M5).

A batch is what one unit computes together, and its load is given by port. The same functions serve the network (ports
are links, load is bytes) and the queue of a computing unit (its port is the unit, load is seconds of prefill with a
bandwidth of 1).
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from controller.core.errors import ConfigError

Load = Mapping[str, float]  # by port


class BatchRequest(NamedTuple):
    """One request of a batch. `deadline`: of its first token. `load`: by port, such as bytes by link. `value`: worth
    relative to others (not in the paper); of equal loads the one of less value is pruned first."""

    id: str
    deadline: float
    load: Load
    exempt: bool = False  # an operator forced it: it is never pruned
    value: float = 1.0


@dataclass(frozen=True, slots=True)
class Batch:
    """Requests that `unit` computes together in `compute_s`. Raises ConfigError without requests."""

    id: str
    unit: str
    compute_s: float
    requests: Sequence[BatchRequest]

    def __post_init__(self) -> None:
        if not self.requests:
            raise ConfigError(f"batch {self.id!r} has no requests", field="requests")
        if self.compute_s < 0:
            raise ConfigError("compute_s must not be negative", field="compute_s")


class EffectiveDeadline(NamedTuple):
    """`red`: the robust effective deadline. `loose`: the earliest deadline of the loose requests (D_lo)."""

    red: float
    loose: float


def effective_deadline(deadlines: Sequence[float]) -> EffectiveDeadline:
    """RED = f x (earliest tight) + (1 - f) x (earliest loose), split at the largest gap between sorted deadlines.

    With few tight requests it lies near the loose ones, so that one outlier does not carry a whole batch. A single
    deadline, or equal ones, are their own RED. Of equal gaps the first counts. Raises ValueError without deadlines.
    """
    ordered = sorted(deadlines)
    if not ordered:
        raise ValueError("no deadlines")
    gaps = [later - earlier for earlier, later in itertools.pairwise(ordered)]
    if not gaps or max(gaps) <= 0:
        return EffectiveDeadline(ordered[0], ordered[0])
    tight = gaps.index(max(gaps)) + 1
    share = tight / len(ordered)
    loose = ordered[tight]
    return EffectiveDeadline(share * ordered[0] + (1 - share) * loose, loose)


class Pruned(NamedTuple):
    """A request that was taken out, and the check that asked for it."""

    request: str
    batch: str
    port: str  # the bottleneck that it loaded most
    late_batch: str  # whose finish was too late
    finish_s: float  # estimated finish of that batch with the request
    due_s: float  # D_lo of that batch


@dataclass(frozen=True, slots=True)
class BatchOrder:
    """`order`: ids of batches, first to last. `finish_s`: estimated finish of each, after pruning."""

    order: tuple[str, ...]
    pruned: tuple[Pruned, ...]
    finish_s: Mapping[str, float] = field(default_factory=dict)

    @property
    def scavengers(self) -> frozenset[str]:
        return frozenset(each.request for each in self.pruned)


def order_batches(
    batches: Sequence[Batch],
    bandwidth: Mapping[str, float],
    budget: int,
    now: float,
    within_batch: bool = False,
    in_vain: bool = True,
) -> BatchOrder:
    """Alg. 1: batches by RED, each checked in turn against what goes before it, with at most `budget` requests pruned.

    A batch finishes in the worst case (no overlap between batches) after the computing of all batches up to it on its
    unit and the time of the busiest port, load over `bandwidth`. While that is after its D_lo, the request with the
    largest load on the busiest port is pruned, of any batch so far. `within_batch`: of the batch itself, as the paper's
    text has it. Loads of batches that stay too late still count for those behind them.

    `in_vain`: as printed, requests stay pruned for a batch that stays too late all the same, or of which nothing is
    left. Without it they come back, since nobody is in time for it.

    Cost: O(n log n) for n requests, and one pass over the ports for each batch and each pruned request; without
    `in_vain` also for each request that comes back. Raises ConfigError for a port without bandwidth.
    """
    ranked = sorted(
        ((effective_deadline([r.deadline for r in batch.requests]), batch) for batch in batches),
        key=lambda pair: (pair[0].red, pair[1].id),
    )
    ahead: dict[str, float] = {}  # seconds of each port
    computed_until: dict[str, float] = {}
    candidates = _Candidates(bandwidth)
    pruned: list[Pruned] = []
    finish: dict[str, float] = {}
    for deadline, batch in ranked:
        own = _seconds(batch.requests, bandwidth)
        if within_batch:
            candidates = _Candidates(bandwidth)
        for request in batch.requests:
            candidates.add(batch, request)
        computed = computed_until.get(batch.unit, now) + batch.compute_s
        computed_until[batch.unit] = computed
        check = _Check(batch, computed, deadline.loose, ahead, own, bandwidth)
        if in_vain or not check.futile(candidates.exempt):
            taken = check.prune(candidates, budget - len(pruned))
            if taken and not in_vain and not check.saved(taken):
                check.give_back(taken)
                candidates.give_back()
                taken = []
            candidates.keep()
            pruned += [each.why for each in taken]
        finish[batch.id] = check.finish()[1]
        for port, seconds in own.items():
            ahead[port] = ahead.get(port, 0.0) + seconds
    return BatchOrder(tuple(batch.id for _, batch in ranked), tuple(pruned), finish)


class _Taken(NamedTuple):
    """A pruned request, its batch, and why."""

    owner: Batch
    request: BatchRequest
    why: Pruned


@dataclass(frozen=True, slots=True)
class _Check:
    """Whether a batch is in time behind what is `ahead` of it, in seconds of each port. Pruning takes from `ahead` and
    from its `own` seconds."""

    batch: Batch
    computed: float
    loose: float
    ahead: dict[str, float]
    own: dict[str, float]
    bandwidth: Mapping[str, float]

    def finish(self) -> tuple[str, float]:
        """The busiest port, and when the batch has finished."""
        port, seconds = _busiest(self.ahead, self.own)
        return port, self.computed + seconds

    def futile(self, exempt: Mapping[str, float]) -> bool:
        """Whether it would be too late without anything that may be pruned."""
        return self.computed + _busiest(exempt, {})[1] > self.loose

    def prune(self, candidates: _Candidates, most: int) -> list[_Taken]:
        """Take out the heaviest on the busiest port, at most so many, until the batch is in time."""
        taken: list[_Taken] = []
        port, finish = self.finish()
        while finish > self.loose and len(taken) < most:
            heaviest = candidates.take(port)
            if heaviest is None:
                break  # nobody who may be pruned loads the bottleneck
            owner, request = heaviest
            why = Pruned(request.id, owner.id, port, self.batch.id, finish, self.loose)
            taken.append(_Taken(owner, request, why))
            _subtract(self._seconds_of(owner), request.load, self.bandwidth)
            port, finish = self.finish()
        return taken

    def saved(self, taken: Sequence[_Taken]) -> bool:
        """Whether the batch is in time now, with at least one of its requests."""
        own = sum(each.owner is self.batch for each in taken)
        return own < len(self.batch.requests) and self.finish()[1] <= self.loose

    def give_back(self, taken: Sequence[_Taken]) -> None:
        for each in taken:
            total = self._seconds_of(each.owner)
            for port, load in each.request.load.items():
                total[port] = total.get(port, 0.0) + load / self.bandwidth[port]

    def _seconds_of(self, owner: Batch) -> dict[str, float]:
        return self.own if owner is self.batch else self.ahead


class _Candidates:
    """Requests that may be pruned, the largest load by value on a port first; of equal ones that which was added
    first. `exempt`: seconds of each port for those that may not."""

    def __init__(self, bandwidth: Mapping[str, float]) -> None:
        self._bandwidth = bandwidth
        self.exempt: dict[str, float] = {}
        self._by_port: dict[str, list[tuple[float, int]]] = {}
        self._entries: list[tuple[Batch, BatchRequest]] = []
        self._taken: set[int] = set()
        self._popped: list[tuple[str, tuple[float, int]]] = []  # since the last `keep` or `give_back`
        self._lately: list[int] = []  # that were taken since

    def add(self, batch: Batch, request: BatchRequest) -> None:
        if request.exempt:
            for port, load in request.load.items():
                self.exempt[port] = self.exempt.get(port, 0.0) + load / self._bandwidth[port]
            return
        number, worth = len(self._entries), -max(request.value, 1e-6)
        for port, load in request.load.items():
            if load > 0:
                heap = self._by_port.get(port)
                if heap is None:
                    heap = self._by_port[port] = []
                heapq.heappush(heap, (load / worth, number))
        self._entries.append((batch, request))

    def take(self, port: str) -> tuple[Batch, BatchRequest] | None:
        """Remove the heaviest on this port; None if there is none."""
        heap = self._by_port.get(port, [])
        while heap:
            item = heapq.heappop(heap)
            self._popped.append((port, item))
            if item[1] not in self._taken:
                self._taken.add(item[1])
                self._lately.append(item[1])
                return self._entries[item[1]]
        return None

    def keep(self) -> None:
        """What was taken lately stays so."""
        self._popped.clear()
        self._lately.clear()

    def give_back(self) -> None:
        """What was taken lately may be pruned again."""
        for port, item in self._popped:
            heapq.heappush(self._by_port[port], item)
        self._taken.difference_update(self._lately)
        self.keep()


def _seconds(requests: Sequence[BatchRequest], bandwidth: Mapping[str, float]) -> dict[str, float]:
    """How long each port takes for these requests. Raises ConfigError for a port without bandwidth."""
    total: dict[str, float] = {}
    for request in requests:
        for port, load in request.load.items():
            rate = bandwidth.get(port, 0.0)
            if not rate > 0:
                raise ConfigError(f"port {port!r} has no bandwidth", field="bandwidth")
            total[port] = total.get(port, 0.0) + load / rate
    return total


def _busiest(ahead: Mapping[str, float], own: Mapping[str, float]) -> tuple[str, float]:
    """The port that needs the most seconds for what goes before and the batch itself, and those seconds."""
    worst = max(ahead, key=ahead.__getitem__, default="")
    seconds = ahead.get(worst, 0.0)
    for port, alone in own.items():
        needed = alone + ahead.get(port, 0.0)
        if needed > seconds:
            worst, seconds = port, needed
    return (worst, seconds) if seconds > 0 else ("", 0.0)


def _subtract(total: dict[str, float], load: Load, bandwidth: Mapping[str, float]) -> None:
    for port, part in load.items():
        left = total.get(port, 0.0) - part / bandwidth[port]
        total[port] = left if abs(left) > 1e-9 else 0.0
