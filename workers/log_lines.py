"""One record is one line: what clients name (a request id, a class, a path) cannot forge a line of its own."""

from __future__ import annotations

import logging
import re
import time
import traceback
from collections.abc import Callable

REPEATED_S = 60.0
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029]")


class OneLine(logging.Filter):
    """For handlers. Escapes control characters in messages, terminal escapes too, and indents tracebacks, since the
    text of an exception may have line breaks."""

    def filter(self, record: logging.LogRecord) -> bool:
        message = record.getMessage()
        if _CONTROL.search(message):
            record.msg, record.args = escaped(message), None
        if record.exc_info and record.exc_info[0] is not None and not record.exc_text:
            lines = "".join(traceback.format_exception(*record.exc_info)).splitlines()
            record.exc_text = "\n".join(f"  {escaped(line)}" for line in lines)
        return True


class WithoutTraceback(logging.Filter):
    """For loggers that log an exception which became an answer, as a page that a role may not open: the line says so,
    and where it was raised helps nobody. Errors keep theirs."""

    def filter(self, record: logging.LogRecord) -> bool:
        if record.levelno < logging.ERROR:
            record.exc_info = record.exc_text = None
        return True


class RepeatedLine:
    """A line about what fails at each of many calls while something else is away: at once the first time, then one at
    most every `REPEATED_S`, with how often it failed since the last one. Not thread-safe."""

    def __init__(self, log: logging.Logger, told: str, clock: Callable[[], float] = time.monotonic) -> None:
        """`told`: with one %s, the error."""
        self._log, self._told, self._clock = log, told, clock
        self._untold = 0
        self._at: float | None = None  # of the last line

    def write(self, error: object) -> None:
        now = self._clock()
        self._untold += 1
        if self._at is None:
            self._log.info(self._told, error)
        elif now - self._at < REPEATED_S:
            return
        else:
            self._log.info(f"{self._told} (%d times in %.0f s)", error, self._untold, now - self._at)
        self._at, self._untold = now, 0


def escaped(text: str) -> str:
    """Control characters as Python would write them, such as \\n and \\x1b."""
    return _CONTROL.sub(lambda found: repr(found.group())[1:-1], text)


def log_to_stderr(level: int = logging.INFO, line: str = "%(asctime)s %(levelname)s %(name)s %(message)s") -> None:
    """For processes without Django's settings."""
    logging.basicConfig(level=level, format=line)
    keep_to_one_line()


def keep_to_one_line() -> None:
    """Install the filter on the root's handlers: one of a logger would not see the records of its children."""
    for handler in logging.getLogger().handlers:
        if not any(isinstance(known, OneLine) for known in handler.filters):
            handler.addFilter(OneLine())
