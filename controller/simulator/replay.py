"""Replays a gateway's scheduler log through the simulator's driver, and checks that the replies are the same.

The log takes the place of simulated engines: its batches happen at the times at which the gateway passed them on, and
actions are not performed. It also contains the scheduler's wake-ups, since a real clock wakes it a little late.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from controller.core import events as ev
from controller.dispatch import build_scheduler
from controller.dispatch.event_log import Encoder, Log, LoggedBatch
from controller.simulator.fleet.driver import Driver
from controller.simulator.heap import EventKind


class ReplayDifference(NamedTuple):
    """Batch number `batch` (from 1) was answered differently. Actions in the form of the log, then the wake-up."""

    batch: int
    at: float
    logged: tuple[Sequence[Any], float | None]
    answered: tuple[Sequence[Any], float | None]


class Replay:
    """Replay one log, once. `kinds` counts the compared actions by type."""

    def __init__(self, log: Log) -> None:
        policy, overrides = log.header
        # The gateway survived this exception, so the replay does too.
        scheduler = build_scheduler(policy, overrides, lambda who, events, error: None)
        self.driver = Driver(scheduler, self._answer, listener=self._name_later_requests, wakes=False)
        self.driver.handlers[EventKind.DELIVERY] = self._handed_over
        self.batches = 0
        self.kinds: Counter[str] = Counter()
        self._log = log.batches()
        self._encoder = Encoder()
        self._answered: list[Any] = []
        self._plan()

    def differences(self) -> Iterator[ReplayDifference]:
        while self.driver.heap:
            self._answered = []
            self.driver.step()
            logged = self._batch.actions, self._batch.wake_at
            actions = json.loads(json.dumps(self._answered))  # in the form in which the log is read
            answered = actions, self.driver.wake_at
            if answered != logged:
                yield ReplayDifference(self.batches, self._batch.now, logged, answered)

    def _plan(self) -> None:
        """Schedule one batch ahead, never two: events name requests that earlier batches brought."""
        batch = next(self._log, None)
        if batch is not None:
            self.driver.heap.push(batch.now, EventKind.DELIVERY, batch)

    def _handed_over(self, batch: LoggedBatch, _: int) -> None:
        self._batch = batch
        self.batches += 1
        self.driver.tell(*batch.events)
        self._plan()

    def _name_later_requests(self, events: Sequence[ev.Event], now: float) -> None:
        self._encoder.named(events)  # later batches name requests by id, as in the log

    def _answer(self, actions: Sequence[ev.Action]) -> None:
        self._answered += self._encoder.named(actions)
        self.kinds.update(type(action).__name__ for action in actions)
