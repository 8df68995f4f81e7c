"""Forms that cannot be trusted and posts of nobody: recorded like any refusal, but no stranger fills the audit.

A bucket each for strangers and for people who are signed in: `BURST` at once, then one every `EVERY_S`. What is left
out is counted, and the next one that is written says how many; the metric counts them all.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

from django.db import Error as DatabaseError
from django.http import HttpRequest
from psycopg_pool import PoolTimeout

from console.metrics import REFUSED
from controller.services.actors import Actor
from controller.services.decisions import decision_record

log = logging.getLogger(__name__)

BURST = 20
EVERY_S = 30.0  # for each console process
NOBODY = "(nobody signed in)"  # no user name may have parentheses
SAFE = ("GET", "HEAD", "OPTIONS")


class Bounded:
    """How often something is written, by key."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._buckets: dict[str, tuple[float, float]] = {}  # by key: what is left, and when that was so
        self._left_out: dict[str, int] = {}

    def take(self, key: str) -> int | None:
        """How many were left out since the last one that was written; None: so is this one."""
        with self._lock:
            now = self._clock()
            left, at = self._buckets.get(key, (float(BURST), now))
            left = min(float(BURST), left + (now - at) / EVERY_S)
            if left < 1.0:
                self._buckets[key] = left, now
                self._left_out[key] = self._left_out.get(key, 0) + 1
                return None
            self._buckets[key] = left - 1.0, now
            return self._left_out.pop(key, 0)

    def not_written(self, key: str, count: int) -> None:
        """It could not be written after all."""
        with self._lock:
            self._left_out[key] = self._left_out.get(key, 0) + count


LOG = Bounded()


def refused_record(request: HttpRequest, reason: str) -> None:
    """The decision `access_refused`. Never an error: who is refused is refused without the database too."""
    REFUSED.labels(reason).inc()
    try:
        signed_in = request.user.is_authenticated
        key = "people" if signed_in else "strangers"
        left_out = LOG.take(key)
        if left_out is None:
            return
    except (DatabaseError, PoolTimeout) as error:
        log.warning("refused, not recorded: %s", error, extra={"action": "refusal_not_recorded"})
        return
    try:
        decision_record(
            actor=Actor.person(request.user.get_username() if signed_in else NOBODY),
            kind="access_refused",
            subject_type="page",
            subject=request.path.replace("\x00", "\ufffd")[:255],
            reason=reason,
            inputs={"method": request.method, "not_written_before": left_out},
        )
    except (DatabaseError, PoolTimeout) as error:
        LOG.not_written(key, left_out + 1)
        log.warning("refused, not recorded: %s", error, extra={"action": "refusal_not_recorded"})
