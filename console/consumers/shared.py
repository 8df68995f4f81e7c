"""A hundred browsers on one topic see the same state: it is shaped and written as JSON once."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Any

import orjson

KEPT = 4  # states of different age that sockets may be at


class Shared:
    """Newest states of one topic by what they were made from. Used on one event loop."""

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
