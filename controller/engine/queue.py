"""Sequences in a fixed order: most urgent first, removable anywhere."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator

from controller.core.steps import Seq

Key = tuple[int, float, str]


def by_priority(seq: Seq) -> Key:
    """Lower priority value first; ties by arrival, then id."""
    return (seq.priority, seq.arrival, seq.id)


def by_arrival(seq: Seq) -> Key:
    return (0, seq.arrival, seq.id)


class SeqQueue:
    """A sorted list. A key must not change while its sequence is in here."""

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
