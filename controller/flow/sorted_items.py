"""Items in the order of sort keys that change. Whoever asks sees those between two keys, not all that there are."""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections.abc import Iterator
from typing import Any, Generic, TypeVar

T = TypeVar("T")


class SortedItems(Generic[T]):
    """Each item has a number, by which it is found again and which orders equal keys. Keys are of one comparable type.

    Cost: O(log n) comparisons, and a part of a list of pointers is moved, which for 20,000 items takes microseconds.
    """

    def __init__(self) -> None:
        self._entries: list[tuple[Any, int, T]] = []
        self._keys: dict[int, Any] = {}

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, number: int) -> bool:
        return number in self._keys

    def __iter__(self) -> Iterator[tuple[Any, int, T]]:
        """Keys, numbers and items in order."""
        return iter(self._entries)

    def put(self, key: Any, number: int, item: T) -> None:
        """Add the item, or move it to this key."""
        before = self._keys.get(number)
        if before == key:
            return
        if before is not None:
            self.drop(number)
        self._keys[number] = key
        insort(self._entries, (key, number, item))

    def drop(self, number: int) -> None:
        """Nothing happens if it is not there."""
        key = self._keys.pop(number, None)
        if key is not None:
            del self._entries[bisect_left(self._entries, (key, number))]

    def first_key(self) -> Any:
        """None if there are no items."""
        return self._entries[0][0] if self._entries else None

    def between(self, after: Any, until: Any) -> list[T]:
        """Items with a larger key than `after`, up to `until` included."""
        found = self._entries[self._end(after) : self._end(until)]
        return [item for _, _, item in found]

    def backwards(self, until: Any) -> Iterator[tuple[Any, T]]:
        """Keys and items from the last one with at most this key to the first."""
        for place in range(self._end(until) - 1, -1, -1):
            key, _, item = self._entries[place]
            yield key, item

    def take(self, until: Any) -> list[T]:
        """Remove those with at most this key."""
        if not self._entries or self._entries[0][0] > until:
            return []
        end = self._end(until)
        taken, self._entries = self._entries[:end], self._entries[end:]
        for _, number, _ in taken:
            del self._keys[number]
        return [item for _, _, item in taken]

    def _end(self, key: Any) -> int:
        """How many have at most this key."""
        return bisect_left(self._entries, (key, math.inf))
