"""A circuit breaker for PostgreSQL: one caller finds out that it is unavailable, and all others are refused at once
until a probe has connected.

States: closed (calls pass) and open. A failed call opens it and starts one probe in the background, which tries again
every `pause_s`; the first success closes it. No caller waits for a server that is known to be unavailable.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

import psycopg

log = logging.getLogger(__name__)

PAUSE_S = 0.5


class CircuitOpen(psycopg.OperationalError):
    """The server was unavailable a moment ago and has not answered a probe since."""


class Circuit:
    """`probe` connects once or raises psycopg.Error; `restored` is called after an outage that a probe has seen."""

    def __init__(self, probe: Callable[[], None], restored: Callable[[], None], pause_s: float = PAUSE_S) -> None:
        self._probe, self._restored, self._pause_s = probe, restored, pause_s
        self._lock = threading.Lock()
        self._open = False

    def check(self) -> None:
        if self._open:
            raise CircuitOpen("PostgreSQL is unavailable; it is tried again in the background")

    def failed(self) -> None:
        """A call could not connect. Opens the circuit, once."""
        with self._lock:
            if self._open:
                return
            self._open = True
        threading.Thread(target=self._wait_until_back, name="postgres-probe", daemon=True).start()

    def _wait_until_back(self) -> None:
        wake, outage = threading.Event(), False
        while True:
            try:
                self._probe()
            except psycopg.Error as error:
                if not outage:
                    log.warning("PostgreSQL is unavailable: %s", error, extra={"action": "postgres_away"})
                outage = True
                wake.wait(self._pause_s)
                continue
            if outage:  # else all connections were busy, and nothing is wrong with them
                self._restored()
                log.info("PostgreSQL is back", extra={"action": "postgres_back"})
            self._open = False
            return
