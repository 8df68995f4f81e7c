"""Order of batches and pruning of what cannot be in time (MFS sec. 4.4.2, App. B, Alg. 1; worked examples M4, M5).

A batch is what one unit computes together, and its load is given by port. The same functions serve the network (ports
are links, load is bytes) and the queue of a computing unit (its port is the unit, load is seconds of prefill with a
bandwidth of 1).
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from controller.core.errors import ConfigError
from controller.flow.feasibility import RankedBatches, prune

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
    gaps = list(map(operator.sub, ordered[1:], ordered))
    widest = max(gaps, default=0.0)
    if widest <= 0:
        return EffectiveDeadline(ordered[0], ordered[0])
    tight = gaps.index(widest) + 1
    share = tight / len(ordered)
    loose = ordered[tight]
    return EffectiveDeadline(share * ordered[0] + (1 - share) * loose, loose)


def loose_deadlines(deadlines: Sequence[float], ends: Iterable[int]) -> list[float]:
    """D_lo of batches whose deadlines follow on each other, in ascending order. `ends`: how many there are up to the
    end of each batch; none is empty."""
    gaps = list(map(operator.sub, deadlines[1:], deadlines))
    found = []
    start = 0
    for end in ends:
        there = gaps[start : end - 1]
        widest = max(there, default=0.0)
        found.append(deadlines[start + there.index(widest) + 1 if widest > 0 else start])
        start = end
    return found


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
    owners = [batch for _, batch in ranked for _ in batch.requests]
    requests = [request for _, batch in ranked for request in batch.requests]
    ports, loads = _loads(requests, bandwidth)
    found = prune(_columns(ranked, requests, loads, ports, now), budget, within_batch, in_vain)
    pruned = []
    for number, port, place, finish in found.cuts:
        late = ranked[place]
        reason = (ports[port], late[1].id, finish, late[0].loose)
        pruned.append(Pruned(requests[number].id, owners[number].id, *reason))
    order = tuple(batch.id for _, batch in ranked)
    return BatchOrder(order, tuple(pruned), dict(zip(order, found.finish, strict=True)))


def _loads(
    requests: Sequence[BatchRequest], bandwidth: Mapping[str, float]
) -> tuple[list[str], list[dict[int, float]]]:
    """The ports that they load, and of each its seconds by number of request. Raises ConfigError for one without
    bandwidth."""
    loads: dict[str, dict[int, float]] = {}
    for number, request in enumerate(requests):
        for port, load in request.load.items():
            rate = bandwidth.get(port, 0.0)
            if not rate > 0:
                raise ConfigError(f"port {port!r} has no bandwidth", field="bandwidth")
            loads.setdefault(port, {})[number] = load / rate
    return list(loads), list(loads.values())


def _columns(
    ranked: Sequence[tuple[EffectiveDeadline, Batch]],
    requests: Sequence[BatchRequest],
    loads: Sequence[Mapping[int, float]],
    names: Sequence[str],
    now: float,
) -> RankedBatches:
    numbers = {name: number for number, name in enumerate(names)}
    ports = [[numbers[port] for port in request.load] for request in requests]
    ends = list(itertools.accumulate(len(batch.requests) for _, batch in ranked))
    computed_until: dict[str, float] = {}
    computed, needs = [], []
    for (_, batch), end in zip(ranked, ends, strict=True):
        computed_until[batch.unit] = computed_until.get(batch.unit, now) + batch.compute_s
        computed.append(computed_until[batch.unit])
        own = [0.0] * max(1, len(names))
        for request in range(end - len(batch.requests), end):
            for port in ports[request]:
                own[port] += loads[port][request]
        needs.append(own)
    return RankedBatches(
        ends,
        computed,
        [deadline.loose for deadline, _ in ranked],
        needs,
        ports,
        [request.value for request in requests],
        loads,
        [number for number, request in enumerate(requests) if request.exempt],
    )
