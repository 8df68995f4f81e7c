"""When the next instance of each model is expected, as gateway and simulator tell the scheduler (`ev.Expected`)."""

from __future__ import annotations

import math
from collections.abc import Iterable

from controller.core import events as ev

AT_ONCE = 0.0  # before now on every driver's clock
NONE: tuple[float, tuple[float, ...]] = (math.inf, ())  # of a model of which none is starting


class ExpectedInstances:
    """Remembers what the scheduler was told."""

    def __init__(self) -> None:
        self._told: dict[str, tuple[float, tuple[float, ...]]] = {}
        self._on_demand = frozenset[str]()

    @property
    def models(self) -> frozenset[str]:
        """Models of which an instance is starting."""
        return frozenset(self._told) - self._on_demand

    @property
    def on_demand(self) -> frozenset[str]:
        """Models of which none is starting, but will once a request waits for it."""
        return self._on_demand

    def changes(
        self,
        joins: Iterable[tuple[str, float]],
        on_demand: Iterable[str] = (),
        serving: Iterable[tuple[str, float]] = (),
    ) -> list[ev.Expected]:
        """What to tell now. `joins`: model and earliest time (seconds, the driver's clock) of each instance that is
        starting and will take requests, whether others of its model are up or not. `on_demand`: models of which a
        scaler starts an instance once a request waits for it. That is expected at once, unless one is starting already,
        whose time is known. `serving`: model and likely time of each of the `joins` of which that is predicted."""
        earliest = dict[str, float]()
        for model, at in joins:
            earliest[model] = min(at, earliest.get(model, math.inf))
        self._on_demand = frozenset(on_demand) - earliest.keys()
        earliest |= dict.fromkeys(self._on_demand, AT_ONCE)
        likely = dict[str, list[float]]()
        for model, at in serving:
            likely.setdefault(model, []).append(at)
        told = self._told
        self._told = {model: (at, tuple(sorted(likely.get(model, ())))) for model, at in earliest.items()}
        every = sorted(self._told.keys() | told.keys())
        found = [(model, self._told.get(model, NONE)) for model in every]
        return [ev.Expected(model, *what) for model, what in found if what != told.get(model, NONE)]
