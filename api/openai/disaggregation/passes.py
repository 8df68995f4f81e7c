"""The asyncio driver of a migrator: events in, its actions to whoever performs them, one wake-up, nothing lost."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable, Sequence

from controller.core import events as ev
from controller.dispatch import Migrator

log = logging.getLogger(__name__)

SHORTEST_WAKE_S = 0.0005
AFTER_FAILURE_S = 0.1  # next try of a migrator that raised


class Passes:
    """`act` performs one action. `woke`: the time the migrator asked for has come. `rescue` follows a pass that failed,
    with its time: a request may be lost to the migrator."""

    def __init__(
        self,
        migrator: Migrator,
        act: Callable[[ev.Action], None],
        woke: Callable[[], None],
        rescue: Callable[[float], None],
    ) -> None:
        self._migrator = migrator
        self._act = act
        self._woke = woke
        self._rescue = rescue
        self._wake: asyncio.TimerHandle | None = None

    def run(self, events: Sequence[ev.Event], now: float) -> None:
        self.close()
        failed = False
        try:
            reply = self._migrator.handle(events, now)
        except Exception:  # a bug in a placement must neither lose what happened nor leave clients waiting for ever
            log.exception("the migrator failed on %d events", len(events))
            reply, failed = self._salvage(events, now), True
        if reply.wake_at is not None and math.isfinite(reply.wake_at):
            delay = max(SHORTEST_WAKE_S, reply.wake_at - now)
            self._wake = asyncio.get_running_loop().call_later(delay, self._time)
        for action in reply.actions:
            self._act(action)
        if failed:
            self._rescue(now)

    def close(self) -> None:
        """No wake-up comes any more."""
        if self._wake is not None:
            self._wake.cancel()
            self._wake = None

    def _salvage(self, events: Sequence[ev.Event], now: float) -> ev.Reply:
        """Fed again, one by one: the migrator may hear any of them twice. A Place that was lost meets its time-out."""
        actions: list[ev.Action] = []
        for event in events:
            try:
                actions += self._migrator.handle([event], now).actions
            except Exception:  # this one is what it fails on: the others are not to suffer
                log.exception("the migrator failed on %r alone", event)
        return ev.Reply(actions, now + AFTER_FAILURE_S)

    def _time(self) -> None:
        self._wake = None
        self._woke()
