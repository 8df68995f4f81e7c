"""Makes Celery's logs readable: an outage is one line every 30 s instead of a long traceback each second."""

from __future__ import annotations

import logging
import time

from workers.log_lines import keep_to_one_line

REPEAT_AFTER_S = 30.0
# At INFO these write a line for each task, each second. Their warnings stay.
CHATTY = ("celery.worker.strategy", "celery.worker.request", "celery.app.trace", "celery.beat")
OUTAGES = ("OperationalError", "ConnectionError", "TimeoutError", "InterfaceError", "SchedulingError")


class OutageFilter(logging.Filter):
    """Shortens log records of lost connections to one line, and repeats the same line at most every 30 s."""

    def __init__(self) -> None:
        super().__init__()
        self._said: dict[str, float] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        kind = _outage(record)
        if kind is None:
            return True
        name = f"{record.name}:{kind}"
        if time.monotonic() - self._said.get(name, -REPEAT_AFTER_S) < REPEAT_AFTER_S:
            return False
        self._said[name] = time.monotonic()
        record.msg, record.args = record.getMessage().splitlines()[0][:300], None
        record.exc_info = record.exc_text = None
        return True


def _outage(record: logging.LogRecord) -> str | None:
    if record.exc_info and record.exc_info[0] is not None:
        names = {cls.__name__ for cls in record.exc_info[0].__mro__}
        return next((name for name in OUTAGES if name in names), None)
    message = record.getMessage() if record.levelno >= logging.ERROR else ""
    return next((name for name in OUTAGES if name in message), None)


def quieten() -> None:
    """Install the filter on the handlers, since a filter of a logger does not see the records of its children."""
    for name in CHATTY:
        logging.getLogger(name).setLevel(logging.WARNING)
    for handler in logging.getLogger().handlers:
        if not any(isinstance(existing, OutageFilter) for existing in handler.filters):
            handler.addFilter(OutageFilter())
    keep_to_one_line()
