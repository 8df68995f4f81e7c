"""Outages in Celery's log: one line, not eighty."""

import logging
import sys

from workers.tasks.logs import OutageFilter


def record(error=None, message="beat: cannot connect\nsecond line", level=logging.ERROR):
    info = None
    if error is not None:
        try:
            raise error
        except type(error):
            info = sys.exc_info()
    return logging.LogRecord("celery.beat", level, __file__, 1, message, None, info)


def test_a_lost_connection_is_told_in_one_line():
    told = record(ConnectionRefusedError("no"))
    assert OutageFilter().filter(told)
    assert told.getMessage() == "beat: cannot connect"
    assert told.exc_info is None


def test_and_not_again_for_half_a_minute():
    outage = OutageFilter()
    assert [outage.filter(record(TimeoutError())) for _ in range(3)] == [True, False, False]


def test_defects_keep_their_traceback_every_time():
    outage = OutageFilter()
    for _ in range(2):
        told = record(ValueError("ours"))
        assert outage.filter(told)
        assert told.exc_info is not None


def test_ordinary_lines_pass():
    outage = OutageFilter()
    assert all(outage.filter(record(message="decided", level=logging.INFO)) for _ in range(3))
