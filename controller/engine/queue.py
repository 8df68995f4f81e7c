"""Queues of sequences, most urgent first: by a fixed key, or by a prefill order whose keys change with time."""

from __future__ import annotations

import heapq
from bisect import bisect_left
from collections.abc import Callable, Iterator

from controller.core.steps import Seq
from controller.policies.ordering.prefill_orders import PrefillOrder

Key = tuple[int, float, str]


def by_priority(seq: Seq) -> Key:
    """Lower priority value first; ties by arrival, then id."""
    return (seq.priority, seq.arrival, seq.id)


def by_arrival(seq: Seq) -> Key:
    return (0, seq.arrival, seq.id)


class SeqQueue:
    """A sorted list. A sequence's key must not change while it is in the queue."""

    def __init__(self, key: Callable[[Seq], Key]) -> None:
        self._key = key
        self._keys: list[Key] = []
        self._seqs: list[Seq] = []

    def add(self, seq: Seq) -> None:
        key = self._key(seq)
        index = bisect_left(self._keys, key)
        self._keys.insert(index, key)
        self._seqs.insert(index, seq)

    def remove(self, seq: Seq) -> None:
        index = bisect_left(self._keys, self._key(seq))
        if index == len(self._seqs) or self._seqs[index] is not seq:
            raise KeyError(seq.id)
        del self._keys[index], self._seqs[index]

    def clear(self) -> list[Seq]:
        seqs, self._seqs, self._keys = self._seqs, [], []
        return seqs

    def __len__(self) -> int:
        return len(self._seqs)

    def __iter__(self) -> Iterator[Seq]:
        return iter(self._seqs)

    def items(self) -> list[Seq]:
        """The live list, read-only."""
        return self._seqs


RankKey = tuple[float, float, float, str]  # the order's pair, arrival, id


class RankedQueue:
    """Prompts in a prefill order whose keys change with time, re-sorted only where a key has changed.

    Under S-EDF a waiting prompt's key changes once, when its slack is used up: O(log n) for each change instead of a
    sort in every round. Call `advance(now)` before reading; `now` must not decrease.
    """

    def __init__(self, order: PrefillOrder) -> None:
        self._order = order
        self._keys: list[RankKey] = []
        self._seqs: list[Seq] = []
        self._held: dict[str, tuple[RankKey, float]] = {}  # id to key and seconds needed
        self._turns: list[tuple[float, str]] = []

    def __len__(self) -> int:
        return len(self._seqs)

    def __iter__(self) -> Iterator[Seq]:
        """Most urgent first."""
        return iter(self._seqs)

    @property
    def first(self) -> tuple[RankKey, Seq] | None:
        return (self._keys[0], self._seqs[0]) if self._seqs else None

    def key(self, seq: Seq, needed_s: float, now: float) -> RankKey:
        return (*self._order.key(seq.due, needed_s, seq.arrival, now), seq.arrival, seq.id)

    def add(self, seq: Seq, needed_s: float, now: float) -> None:
        key = self.key(seq, needed_s, now)
        self._held[seq.id] = (key, needed_s)
        index = bisect_left(self._keys, key)
        self._keys.insert(index, key)
        self._seqs.insert(index, seq)
        turn = self._order.turns_at(seq.due, needed_s)
        if now < turn < float("inf"):
            heapq.heappush(self._turns, (turn, seq.id))

    def remove(self, seq: Seq) -> None:
        """Raises KeyError if it is not queued."""
        key, _ = self._held.pop(seq.id)
        index = bisect_left(self._keys, key)
        del self._keys[index], self._seqs[index]

    def advance(self, now: float) -> None:
        while self._turns and self._turns[0][0] <= now:
            _, name = heapq.heappop(self._turns)
            held = self._held.get(name)
            if held is None:
                continue
            seq = self._seqs[bisect_left(self._keys, held[0])]
            self.remove(seq)
            self.add(seq, held[1], now)
