"""Records the events and actions of this gateway's scheduler, for a replay (controller.dispatch.event_log).

Off by default. Each pass writes a line, on the loop, so this is for debugging and not for production. A log ends at its
size limit; whatever goes wrong with it, requests are served as without it.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from controller.core import events as ev
from controller.dispatch import Scheduler
from controller.dispatch.event_log import EventRecorder

log = logging.getLogger(__name__)

MAX_BYTES = 256 * 1024 * 1024


class SchedulerLog:
    """`handle` calls the scheduler's and records it. Raises OSError if `path` cannot be opened."""

    def __init__(
        self, path: Path, scheduler: Scheduler, overrides: Mapping[str, Any], max_bytes: int = MAX_BYTES
    ) -> None:
        self._scheduler = scheduler
        self._recorder = EventRecorder()
        self._left = max_bytes
        self._file = path.open("w", encoding="utf-8", buffering=1)
        self._write(self._recorder.header(scheduler.name, overrides))

    def handle(self, events: Sequence[ev.Event], now: float) -> ev.Reply:
        if self._left <= 0:
            return self._scheduler.handle(events, now)
        encoded = self._recorder.events(events)  # before the call, which changes requests
        reply = self._scheduler.handle(events, now)
        self._write(self._recorder.line(now, encoded, reply))
        return reply

    def _write(self, line: str) -> None:
        self._left -= len(line) + 1
        try:
            if self._left > 0:
                self._file.write(line + "\n")
                return
            log.warning("the scheduler's log is full and ends here")
        except OSError as error:
            log.warning("the scheduler's log ends here: %s", error)
        self._left = 0
        self.close()

    def close(self) -> None:
        self._file.close()
