"""Which requests of batches are pruned, so that the others are in time (MFS App. B, Alg. 1, lines 6-19).

Requests, batches and ports are numbers here, so that a thousand batches take little time. `batches.order_batches` is
the same for those that have names.
"""

from __future__ import annotations

import operator
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from heapq import heappop, heappush
from typing import NamedTuple

LEAST_VALUE = 1e-6
ROUNDING_S = 1e-9  # of a port's seconds

Cut = tuple[int, int, int, float]
"""A request that was pruned for what it loads on a port, since a batch would end at that moment with it."""


class RankedBatches(NamedTuple):
    """Batches in their order, with requests numbered through them. Times are in seconds.

    By batch: `ends`, the number after its last request; `computed`, when it has been computed without any wait for a
    port; `due`, its D_lo; `needs`, seconds of each port for all of its requests. By request: the `ports` that it loads;
    `value`, its worth relative to others. By port: `loads`, seconds of it by request. `exempt`: requests that are never
    pruned, in ascending order.
    """

    ends: Sequence[int]
    computed: Sequence[float]
    due: Sequence[float]
    needs: Sequence[Sequence[float]]
    ports: Sequence[Sequence[int]]
    value: Sequence[float]
    loads: Sequence[Mapping[int, float]]
    exempt: Sequence[int]


class Feasible(NamedTuple):
    """`cuts`: in the order in which they were made. `finish`: of each batch, after pruning."""

    cuts: list[Cut]
    finish: list[float]


def prune(batches: RankedBatches, budget: int, within_batch: bool, in_vain: bool) -> Feasible:
    """The arguments are those of `order_batches`, and so is what it costs."""
    candidates = _Candidates(batches)
    ahead = [0.0] * max(1, len(batches.loads))  # seconds of each port for the batches so far
    never = ahead.copy()  # and of those, for requests that are exempt
    found = Feasible([], [])
    start = held = 0
    for batch, end in enumerate(batches.ends):
        ahead[:] = map(operator.add, ahead, batches.needs[batch])
        while held < len(batches.exempt) and (request := batches.exempt[held]) < end:
            held += 1
            for port in batches.ports[request]:
                never[port] += batches.loads[port][request]
        candidates.reach(end, start if within_batch else 0)
        computed, due = batches.computed[batch], batches.due[batch]
        finish = computed + max(0.0, *ahead)
        if finish > due and (in_vain or computed + max(0.0, *never) <= due):
            before = ahead.copy()
            cuts, after = _cuts(batches, batch, ahead, candidates, budget - len(found.cuts))
            own = sum(cut[0] >= start for cut in cuts)
            if in_vain or (after <= due and own < end - start):
                found.cuts.extend(cuts)
                finish = after
                candidates.keep()
            else:
                candidates.give_back(cuts)
                ahead = before
        found.finish.append(finish)
        start = end
    return found


def _cuts(
    batches: RankedBatches, batch: int, ahead: list[float], candidates: _Candidates, most: int
) -> tuple[list[Cut], float]:
    """Takes the heaviest on the busiest port from `ahead`, at most so many, until the batch is in time. Returns when it
    ends then, too."""
    ports, loads = batches.ports, batches.loads
    computed, due = batches.computed[batch], batches.due[batch]
    cuts: list[Cut] = []
    taken, before = candidates.taken, -1
    while (busy := max(ahead)) > 0:
        finish = computed + busy
        if finish <= due or len(cuts) >= most:
            return cuts, finish
        port = ahead.index(busy)
        if port != before:
            before, there = port, candidates.on(port)
            heap, order, popped = there.heap, there.order, there.popped
        while heap:
            popped.append(place := heappop(heap))
            if not taken[request := order[place]]:
                break
        else:
            return cuts, finish  # nobody who may be pruned loads the bottleneck
        taken[request] = True
        cuts.append((request, port, batch, finish))
        for each in ports[request]:
            left = ahead[each] - loads[each][request]
            ahead[each] = left if left > ROUNDING_S or left < -ROUNDING_S else 0.0
    return cuts, computed


class _Candidates:
    """Requests that may be pruned, the largest load by value on a port first, and of equal ones the one of the lowest
    number. Those of a port are sorted only once it is a bottleneck."""

    def __init__(self, batches: RankedBatches) -> None:
        self._batches = batches
        self._first = self._end = 0
        self._sorted: dict[int, _Sorted] = {}
        self.taken = bytearray(len(batches.ports))  # by request

    def reach(self, end: int, first: int) -> None:
        """From now on requests from number `first` to before `end` may be pruned, of those that were not."""
        self._end = end
        if first != self._first:
            self._first = first
            self._sorted.clear()

    def on(self, port: int) -> _Sorted:
        """Those that load this port, as far as batches have come, with those that were taken for another one."""
        there = self._sorted.get(port)
        if there is None:
            there = self._sorted[port] = _Sorted(self._batches, port, self._first)
        if there.end < self._end:
            there.reach(self._end)
        return there

    def keep(self) -> None:
        """What was taken stays so."""
        for there in self._sorted.values():
            there.popped.clear()

    def give_back(self, cuts: Iterable[Cut]) -> None:
        """These, which were taken since the last `keep`, may be pruned again."""
        for there in self._sorted.values():
            for place in there.popped:
                heappush(there.heap, place)
        for request, *_ in cuts:
            self.taken[request] = False
        self.keep()


class _Sorted:
    """A heap of the requests that load one port and may be pruned, as far as batches have come.

    Numbers that count from the heaviest, since tuples with weights take longer: `order` has
    the request of each, `popped` those that are not in the heap any more.
    """

    def __init__(self, batches: RankedBatches, port: int, first: int) -> None:
        self.heap: list[int] = []
        self.popped: list[int] = []
        self.end = first
        value, exempt = batches.value, set(batches.exempt)
        weights = {
            request: load / worth if (worth := value[request]) > LEAST_VALUE else load / LEAST_VALUE
            for request, load in batches.loads[port].items()
            if load > 0 and request >= first and request not in exempt
        }
        self._requests = list(weights)
        self.order = sorted(weights, key=weights.__getitem__, reverse=True)  # of equal ones the first stays in front
        places = [0] * len(value)  # by request
        for place, request in enumerate(self.order):
            places[request] = place
        self._places = [places[request] for request in weights]
        self._next = 0

    def reach(self, end: int) -> None:
        until = bisect_left(self._requests, end, self._next)
        for place in self._places[self._next : until]:
            heappush(self.heap, place)
        self.end, self._next = end, until
