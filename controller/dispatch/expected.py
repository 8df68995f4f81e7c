"""When the next instance of each model is expected, as gateway and simulator tell the scheduler (`ev.Expected`)."""

from __future__ import annotations

import math
from collections.abc import Iterable

from controller.core import events as ev


class ExpectedInstances:
    """Remembers what the scheduler was told."""

    def __init__(self) -> None:
        self._told: dict[str, float] = {}

    @property
    def models(self) -> frozenset[str]:
        """Models of which an instance is expected."""
        return frozenset(self._told)

    def changes(self, joins: Iterable[tuple[str, float]]) -> list[ev.Expected]:
        """What to tell now. `joins`: model and earliest time (seconds, the driver's clock) of each instance that is
        starting and will take requests, whether others of its model are up or not."""
        earliest = dict[str, float]()
        for model, at in joins:
            earliest[model] = min(at, earliest.get(model, math.inf))
        told, self._told = self._told, earliest
        every = sorted(earliest.keys() | told.keys())
        pairs = [(model, earliest.get(model, math.inf)) for model in every]
        return [ev.Expected(model, at) for model, at in pairs if at != told.get(model, math.inf)]
