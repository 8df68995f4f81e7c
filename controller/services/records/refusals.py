"""Unauthorised attempts to change something: recorded like any decision, at a bounded rate so that they cannot fill the
audit log.

Each kind of caller has a bucket, and of those who have proved who they are each has one of their own, so that none
keeps another's attempts out of the audit: `BURST` at once, then one every `EVERY_S`. Attempts that are left out are
counted, and the next record has their number.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

from django.db import Error as DatabaseError
from psycopg_pool import PoolTimeout

from controller.services.actors import Actor
from controller.services.decisions import decision_record

log = logging.getLogger(__name__)

BURST = 20
EVERY_S = 30.0  # in each console process
NOBODY = Actor.person("(nobody signed in)")  # user names cannot have parentheses


class Bounded:
    """Bounds how often something is written, by key."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._buckets: dict[str, tuple[float, float]] = {}  # by key: tokens left, and at what time
        self._left_out: dict[str, int] = {}

    def take(self, key: str) -> int | None:
        """How many were left out since the last record; None: this one is left out too."""
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
        """The record could not be written."""
        with self._lock:
            self._left_out[key] = self._left_out.get(key, 0) + count


LOG = Bounded()


def access_refused(
    *, actor: Actor, bucket: str, subject_type: str, subject: str, reason: str, inputs: Mapping[str, Any]
) -> None:
    """Record the decision `access_refused`. Never raises, since access is refused without a database too."""
    key = bucket if actor == NOBODY else f"{bucket} {actor.name}"
    left_out = LOG.take(key)
    if left_out is None:
        return
    try:
        decision_record(
            actor=actor,
            kind="access_refused",
            subject_type=subject_type,
            subject=subject.replace("\x00", "\ufffd")[:255],
            reason=reason,
            inputs={**inputs, "not_written_before": left_out},
        )
    except (DatabaseError, PoolTimeout) as error:
        LOG.not_written(key, left_out + 1)
        log.warning("refused, not recorded: %s", error, extra={"action": "refusal_not_recorded"})
