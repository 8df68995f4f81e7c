"""A state shown to many browsers is shaped and serialised to JSON once."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Any

import orjson

KEPT = 4  # sockets may be a few states apart


class Shared:
    """The newest states of one topic, by the key that they were made from. For use on one event loop."""

    def __init__(self, kept: int = KEPT) -> None:
        self._kept = kept
        self._made: OrderedDict[Hashable, orjson.Fragment] = OrderedDict()

    def get(self, key: Hashable, make: Callable[[], Any]) -> orjson.Fragment:
        found = self._made.get(key)
        if found is None:
            found = self._made[key] = orjson.Fragment(orjson.dumps(make()))
            while len(self._made) > self._kept:
                self._made.popitem(last=False)
        return found
