"""A psycopg connection that waits a bounded time for the server.

`statement_timeout` is kept by the server, so a stopped server or a lost network would block a caller forever. Here
each exchange (connect, execute, a COPY chunk, commit) ends after `patience_s` with an OperationalError, and the
connection is closed: what the server did with the statement is unknown, and an answer that came late must not be read
as the next one's.
"""

from __future__ import annotations

import time
from collections.abc import Generator
from typing import Any, TypeVar

import psycopg
from psycopg.abc import PQGen

T = TypeVar("T")


class ServerHangs(psycopg.OperationalError):
    """The server did not answer in time; the connection is closed."""


class BoundedConnection(psycopg.Connection[Any]):
    """`patience_s` may be set on the class (a process) or on one connection. Seconds."""

    patience_s: float = 10.0

    def wait(self, gen: PQGen[T], interval: float = 0.1, timeout: float | None = None) -> T:
        try:
            return super().wait(_bounded(gen, self.patience_s), interval=interval, timeout=timeout)
        except ServerHangs:
            self.pgconn.finish()
            raise


def _bounded(gen: PQGen[T], patience_s: float) -> Generator[Any, Any, T]:
    """The same exchange, given up when nothing has come for `patience_s` since it began.

    psycopg asks every `interval` even when nothing is ready (a false `ready`); only then is the time looked at.
    """
    give_up_at = time.monotonic() + patience_s
    try:
        wanted = next(gen)
        while True:
            ready = yield wanted
            if not ready and time.monotonic() > give_up_at:
                gen.close()
                raise ServerHangs(f"no answer from PostgreSQL within {patience_s:g} s")
            wanted = gen.send(ready)
    except StopIteration as done:
        return done.value
