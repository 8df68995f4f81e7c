"""What one look at an instance leads to, and that repeated looks come to rest."""

from dataclasses import replace

import pytest

from controller.scale import lifecycle
from controller.scale.lifecycle import CallStart, CallStop, Mark, Replace, Seen, StopWanted, Wanted, converge

NOW = 5000.0
URL = "http://127.0.0.1:9001"
RUNNING = Wanted("a", "running", "pending", since=NOW - 5)
READY = Seen("ready", URL, started_at=NOW - 4)


def steps(row, seen, now=NOW):
    return converge([row], {} if seen is None else {row.id: seen}, now)


def test_a_spec_without_process_is_started():
    assert steps(RUNNING, None) == [CallStart("a")]


def test_a_replacement_waits_out_its_pause():
    assert steps(replace(RUNNING, since=NOW + 2), None) == []


def test_ready_is_recorded_with_its_address_once():
    [mark] = steps(RUNNING, READY)
    assert (mark.state, mark.url, mark.reason) == ("ready", URL, "healthy")
    assert steps(replace(RUNNING, state="ready", url=URL, run=READY.started_at), READY) == []


def test_a_new_run_over_the_same_id_is_a_new_interval():
    row = replace(RUNNING, state="ready", url=URL, run=NOW - 900)
    [mark] = steps(row, READY)
    assert mark.again
    assert mark.reason == "new_run"


def test_a_crashed_process_is_replaced_and_cleared():
    row = replace(RUNNING, state="ready", url=URL)
    failed, call = steps(row, Seen("exited", URL, exit_code=-9))
    assert failed == Replace("a", "exited", "was killed by signal 9")
    assert call == CallStop("a", 0.0)


@pytest.mark.parametrize(
    ("code", "line", "error", "refused"),
    [
        (1, "", "exit code 1", ""),
        (1, "ValueError: x", "exit code 1: ValueError: x", ""),
        (-9, "Killed", "was killed by signal 9: Killed", ""),
        (None, "device 2 is not there", "device 2 is not there", ""),
        (2, "error: --threads: must be at least 1", "exit code 2: error: --threads: must be at least 1",
         "error: --threads: must be at least 1"),
        (2, "", "exit code 2", "exit code 2"),
    ],
)  # fmt: skip
def test_how_a_process_ended_is_said_and_whether_its_settings_were_refused(code, line, error, refused):
    step = steps(RUNNING, Seen("exited", URL, exit_code=code, error=line))[0]
    assert (step.error, step.refused) == (error, refused)


def test_a_start_that_takes_too_long_is_replaced():
    row = replace(RUNNING, state="starting", since=NOW - 500)
    young, old = (Seen("starting", started_at=NOW - age) for age in (10, lifecycle.START_TIMEOUT_S + 1))
    assert steps(row, young) == []
    assert steps(row, old)[0] == Replace("a", "start_timeout", "not ready within 180 s")


def test_an_endpoint_of_somebody_else_becomes_unreachable_and_returns():
    row = replace(RUNNING, state="ready", url=URL, replaceable=False)
    [gone] = steps(row, Seen("exited", URL, error="ConnectionError"))
    assert gone == Mark("a", "unreachable", "no_answer", URL, "ConnectionError")
    assert steps(replace(row, state="unreachable"), Seen("exited", URL)) == []
    [back] = steps(replace(row, state="unreachable"), Seen("ready", URL))
    assert back.state == "ready"


@pytest.mark.parametrize(
    ("outstanding", "drained_for", "expected"),
    [
        (0, 1.0, None),  # a gateway may not know of the drain yet
        (0, 2.0, "drained"),
        (3, 60.0, None),
        (None, 60.0, None),  # nobody knows what it still does
        (None, 899.0, None),
        (None, 900.0, "drain_timeout"),
        (3, 900.0, "drain_timeout"),
    ],
)
def test_a_drain_ends_when_it_is_empty_or_too_long(outstanding, drained_for, expected):
    row = Wanted("a", "draining", "draining", NOW - drained_for, URL, READY.started_at, outstanding=outstanding)
    assert steps(row, READY) == ([] if expected is None else [StopWanted("a", expected)])


def test_a_drain_is_recorded_as_seen():
    row = Wanted("a", "draining", "ready", NOW - 1, URL, READY.started_at, outstanding=4)
    assert [step.state for step in steps(row, READY)] == ["draining"]


def test_stopping_repeats_the_call_until_it_is_gone():
    row = Wanted("a", "stopped", "draining", NOW - 1, URL)
    assert steps(row, READY) == [CallStop("a", lifecycle.STOP_GRACE_S)]
    assert steps(row, None) == [Mark("a", "stopped", "stopped"), CallStop("a", 0.0)]


def test_what_belongs_to_no_row_is_stopped():
    assert converge([], {"ghost": READY}, NOW) == [CallStop("ghost", lifecycle.STOP_GRACE_S)]


def test_pauses_grow_with_failures_up_to_a_minute():
    assert [lifecycle.pause_before_start(n) for n in (0, 1, 2, 3, 4, 20)] == [0, 0, 1, 2, 4, 60]
