"""Drives a scheduler on virtual time, for simulations and for replays of what a gateway recorded.

Everything of one instant reaches the scheduler in one batch, as in the gateway's loop; what it answers is performed at
once, and its wake-up is one more happening. Nothing is decided here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from controller.core import events as ev
from controller.dispatch import Scheduler
from controller.simulator.heap import EventHeap, EventKind

Handler = Callable[[Any, int], None]


class Driver:
    """`perform` gets the actions of each pass, `heard` all that the scheduler was told. `wakes`: False where the
    happenings themselves say when the scheduler woke."""

    def __init__(
        self,
        scheduler: Scheduler,
        perform: Callable[[Sequence[ev.Action]], None],
        *,
        heard: Callable[[Sequence[ev.Event], float], None] | None = None,
        wakes: bool = True,
    ) -> None:
        self.scheduler = scheduler
        self.heap = EventHeap()
        self.handlers: dict[EventKind, Handler] = {EventKind.WAKE: self._woke, EventKind.TICK: lambda what, _: what()}
        self.happened = 0
        self.passes = 0
        self._perform = perform
        self._heard = heard
        self._wakes = wakes
        self._pending: list[ev.Event] = []
        self._news: list[ev.Event] = []
        self._passing = False
        self._wake, self._wake_at = 0, None  # type: tuple[int, float | None]

    # ---- what happened ---------------------------------------------------------------------------------------------

    def tell(self, *events: ev.Event) -> None:
        """In the pass that follows this instant's happenings."""
        self._pending.extend(events)

    def report(self, event: ev.Event) -> None:
        """In a pass of this instant, be it under way."""
        self._news.append(event)
        if not self._passing:
            self.heap.push(self.heap.now, EventKind.TICK, self._pass_news)

    def mention(self, event: ev.Event) -> None:
        """What nobody waits for: it travels with the next news."""
        self._news.append(event)

    def drop_pending(self) -> None:
        """Nobody is left whom these events concern."""
        self._pending.clear()

    # ---- the loop --------------------------------------------------------------------------------------------------

    def step(self) -> None:
        """The next happening, and a pass if it was the last of its instant."""
        _, kind, _, subject, version = self.heap.pop()
        self.happened += 1
        self.handlers[kind](subject, version)
        if self._pending and self.heap.next_at > self.heap.now:
            events, self._news, self._pending = self._news + self._pending, [], []
            self._pass(events)

    def _pass_news(self) -> None:
        if self._news:
            events, self._news = self._news, []
            self._pass(events)

    def _pass(self, events: Sequence[ev.Event]) -> None:
        """Until nothing new happens at this instant."""
        now = self.heap.now
        self._passing = True
        while True:
            self.passes += 1
            if self._heard is not None:
                self._heard(events, now)
            reply = self.scheduler.handle(events, now)
            if reply.actions:
                self._perform(reply.actions)
            if not self._news:
                break
            events, self._news = self._news, []
        self._passing = False
        if self._wakes:
            self._wake_up(reply.wake_at)

    def _wake_up(self, at: float | None) -> None:
        if at == self._wake_at:
            return  # most passes leave it as it was
        self._wake, self._wake_at = self._wake + 1, at
        if at is not None:
            self.heap.push(at, EventKind.WAKE, None, self._wake)

    def _woke(self, _: Any, version: int) -> None:
        if version == self._wake:
            self._wake_at = None
            self._pending.append(ev.Woke())
