"""Instances that will join and take requests: the gateways know of them, and let requests wait for one."""

from __future__ import annotations

from collections.abc import Callable

from controller.core import events as ev
from controller.dispatch.expected import ExpectedInstances


class Joins:
    """`tell`: passes events on to the scheduler."""

    def __init__(self, tell: Callable[[ev.Event], None]) -> None:
        self._tell = tell
        self._expected = ExpectedInstances()
        self._joins: dict[int | str, tuple[str, float]] = {}  # by slot or id: model and earliest time
        self._predicted: set[int | str] = set()  # of these, those that a scaler started
        self._on_demand: set[str] = set()

    def awaited(self, key: int | str, model: str, at: float, *, predicted: bool = False) -> None:
        """An instance takes requests of `model` from `at` on, as far as a gateway knows. `predicted`: not only at the
        earliest, but likely."""
        self._joins[key] = (model, at)
        if predicted:
            self._predicted.add(key)
        self._changed()

    def on_demand(self, model: str) -> None:
        """A scaler starts an instance of `model` whenever a request waits for one."""
        self._on_demand.add(model)
        self._changed()

    def came(self, key: int | str) -> None:
        """It is up, and the scheduler was told so before: requests must not be refused in between. Or its order was
        cancelled."""
        if self._joins.pop(key, None) is not None:
            self._changed()

    def _changed(self) -> None:
        predicted = [each for key, each in self._joins.items() if key in self._predicted]
        for event in self._expected.changes(self._joins.values(), self._on_demand, predicted):
            self._tell(event)
