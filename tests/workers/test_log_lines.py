"""Log lines cannot be forged by what a client names, in any process."""

from __future__ import annotations

import io
import logging
import logging.config
import subprocess
import sys

import pytest
from django.conf import settings

from workers.log_lines import OneLine, RepeatedLine, WithoutTraceback

FORGED = "req-1\n2026-01-01 00:00:00 INFO console: olga signed in\x1b[2K\u2028\x85"


@pytest.fixture
def written():
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    handler.setFormatter(logging.Formatter("%(levelname)s %(message)s"))
    handler.addFilter(OneLine())
    logger = logging.getLogger("tests.log_lines")
    logger.propagate = False
    logger.addHandler(handler)
    yield logger, stream
    logger.removeHandler(handler)


def test_a_value_with_line_breaks_stays_in_its_line(written):
    logger, stream = written
    logger.warning("no request %s (%d)", FORGED, 3)
    line = r"WARNING no request req-1\n2026-01-01 00:00:00 INFO console: olga signed in\x1b[2K\u2028\x85 (3)"
    assert stream.getvalue() == line + "\n"


def test_what_fails_at_each_call_is_told_at_once_and_then_counted_each_minute(written):
    logger, stream = written
    logger.setLevel(logging.INFO)
    now = [0.0]
    line = RepeatedLine(logger, "not kept: %s", lambda: now[0])
    for second in range(150):
        now[0] = float(second)
        line.write("away")
    assert stream.getvalue().splitlines() == [
        "INFO not kept: away",
        "INFO not kept: away (60 times in 60 s)",
        "INFO not kept: away (60 times in 60 s)",
    ]


def test_ordinary_text_is_left_as_it_is(written):
    logger, stream = written
    logger.warning("größer als 5 %% · %s", "データ")
    assert stream.getvalue() == "WARNING größer als 5 % · データ\n"


def test_the_text_of_an_exception_is_indented_and_cannot_look_like_a_record(written):
    logger, stream = written
    try:
        raise ValueError(FORGED)
    except ValueError:
        logger.exception("failed")
    first, *rest = stream.getvalue().splitlines()
    assert first == "ERROR failed"
    assert rest[0] == "  Traceback (most recent call last):"
    assert all(line.startswith("  ") for line in rest)
    assert "\x1b" not in stream.getvalue()


@pytest.mark.parametrize(("level", "traced"), [(logging.WARNING, False), (logging.ERROR, True)])
def test_an_exception_that_became_an_answer_is_one_line(written, level, traced):
    """Django logs a page that a role may not open with the exception that said so."""
    logger, stream = written
    only = WithoutTraceback()
    logger.addFilter(only)
    try:
        raise PermissionError("no")
    except PermissionError as error:
        logger.log(level, "Forbidden", exc_info=error)
    logger.removeFilter(only)
    assert ("Traceback" in stream.getvalue()) is traced
    assert stream.getvalue().splitlines()[0].endswith("Forbidden")


def test_django_uses_it_for_requests():
    (name,) = settings.LOGGING["loggers"]["django.request"]["filters"]
    assert settings.LOGGING["filters"][name]["()"] == "workers.log_lines.WithoutTraceback"


def test_every_handler_of_the_django_processes_has_it():
    assert all("one_line" in handler["filters"] for handler in settings.LOGGING["handlers"].values())


@pytest.mark.parametrize(
    "prepared",
    [
        "from workers.log_lines import log_to_stderr; log_to_stderr()",  # engines and the transfer daemon
        "import logging; logging.basicConfig(); from workers.tasks.logs import quieten; quieten()",  # Celery
    ],
)
def test_processes_without_these_settings_have_it_too(prepared):
    code = f"{prepared}; import logging; logging.getLogger('x').warning('a%s', '\\nb')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stderr.count("\n") == 1
    assert r"a\nb" in done.stderr
