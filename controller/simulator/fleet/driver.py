"""Drives a scheduler on virtual time, for simulations and for replays of recorded gateways.

All events of one instant reach the scheduler in one batch, as in the gateway's loop. Its actions are performed at once,
and its wake-up time is scheduled. Nothing is decided here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from controller.core import events as ev
from controller.dispatch import Scheduler
from controller.simulator.fleet.gateways import GatewayGroup
from controller.simulator.heap import EventHeap, EventKind

Handler = Callable[[Any, int], None]


class Driver:
    """`perform` gets the actions of each pass, `listener` all events that the scheduler got.

    `wakes`: whether the driver schedules the scheduler's wake-ups; False for a replay, whose log contains them.
    """

    def __init__(
        self,
        scheduler: Scheduler | GatewayGroup,
        perform: Callable[[Sequence[ev.Action]], None],
        *,
        listener: Callable[[Sequence[ev.Event], float], None] | None = None,
        wakes: bool = True,
    ) -> None:
        self.scheduler = scheduler
        self.heap = EventHeap()
        self.handlers: dict[EventKind, Handler] = {EventKind.WAKE: self._woke, EventKind.TICK: lambda what, _: what()}
        self.happened = 0
        self.passes = 0
        self.wake_at: float | None = None  # as the scheduler asked in the last pass
        self._perform = perform
        self._listener = listener
        self._wakes = wakes
        self._pending: list[ev.Event] = []
        self._reports: list[ev.Event] = []
        self._passing = False
        self._wake, self._wake_at = 0, None  # type: tuple[int, float | None]

    # ---- what happened ---------------------------------------------------------------------------------------------

    def tell(self, *events: ev.Event) -> None:
        """Give events to the scheduler in the pass after this instant's happenings."""
        self._pending.extend(events)

    def report(self, event: ev.Event) -> None:
        """Give events to the scheduler in a pass of this instant, even if one is running now."""
        self._reports.append(event)
        if not self._passing:
            self.heap.push(self.heap.now, EventKind.TICK, self._pass_reports)

    def report_later(self, event: ev.Event) -> None:
        """Give events to the scheduler together with the next ones; they need no pass of their own."""
        self._reports.append(event)

    def drop_pending(self) -> None:
        """Discard events that no request needs any more."""
        self._pending.clear()

    # ---- the loop --------------------------------------------------------------------------------------------------

    def step(self) -> None:
        """Handle the next happening, and run a pass if it was the last of its instant."""
        _, kind, _, subject, version = self.heap.pop()
        self.happened += 1
        self.handlers[kind](subject, version)
        if self._pending and self.heap.next_at > self.heap.now:
            events, self._reports, self._pending = self._reports + self._pending, [], []
            self._pass(events)

    def _pass_reports(self) -> None:
        if self._reports:
            events, self._reports = self._reports, []
            self._pass(events)

    def _pass(self, events: Sequence[ev.Event]) -> None:
        """Run passes until nothing new happens at this instant."""
        now = self.heap.now
        self._passing = True
        while True:
            self.passes += 1
            if self._listener is not None:
                self._listener(events, now)
            reply = self.scheduler.handle(events, now)
            if reply.actions:
                self._perform(reply.actions)
            if not self._reports:
                break
            events, self._reports = self._reports, []
        self._passing = False
        self.wake_at = reply.wake_at
        if self._wakes:
            self._wake_up(reply.wake_at)

    def _wake_up(self, at: float | None) -> None:
        if at == self._wake_at:
            return  # unchanged in most passes
        self._wake, self._wake_at = self._wake + 1, at
        if at is not None:
            self.heap.push(at, EventKind.WAKE, None, self._wake)

    def _woke(self, _: Any, version: int) -> None:
        if version == self._wake:
            self._wake_at = None
            self._pending.append(ev.Woke())
