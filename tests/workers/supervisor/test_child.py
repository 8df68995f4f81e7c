"""Processes that are started, asked, killed and restarted: with real ones, which end by themselves if a test fails."""

import os
import signal
import subprocess
import sys
import time

import psutil
import pytest

from tests.waiting import until
from workers.supervisor.child import Child, Service, Spec, pause_after, stop_all

STUBBORN = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('on', flush=True); time.sleep(60)"
POLITE = "import time; print('on', flush=True); time.sleep(60)"
WITH_CHILD = f"import subprocess, sys; print('on', flush=True); subprocess.run([sys.executable, '-c', {POLITE!r}])"


def spec(tmp_path, code, grace_s=5.0):
    return Spec("test", (sys.executable, "-c", code), dict(os.environ), tmp_path / "test.log", grace_s=grace_s)


@pytest.fixture
def start(tmp_path):
    """Start code and wait until it says it is on; whatever is left at the end is killed."""
    started = []

    def run(code, grace_s=5.0):
        child = Child(spec(tmp_path, code, grace_s))
        started.append(child)
        until(lambda: "on" in (tmp_path / "test.log").read_text())
        return child

    yield run
    for child in started:
        child.give_up()
        stop_all([child])


def test_a_polite_process_ends_when_asked(start):
    child = start(POLITE)
    stop_all([child])
    assert child.exit_code() == -signal.SIGTERM


def test_a_stubborn_one_is_killed_after_its_grace(start):
    child = start(STUBBORN, grace_s=0.2)
    began = time.monotonic()
    stop_all([child])
    assert child.exit_code() == -signal.SIGKILL
    assert time.monotonic() - began >= 0.2


def test_hurry_ends_the_grace(start):
    child = start(STUBBORN, grace_s=60.0)
    stop_all([child], hurry=lambda: True)
    assert child.exit_code() == -signal.SIGKILL


def test_it_has_a_session_of_its_own_and_takes_its_children_along(start):
    child = start(WITH_CHILD)
    assert os.getsid(child.pid) == child.pid
    until(lambda: psutil.Process(child.pid).children())
    [grandchild] = psutil.Process(child.pid).children()
    stop_all([child])
    _, alive = psutil.wait_procs([grandchild], timeout=5)
    assert alive == []


def test_it_dies_with_a_parent_that_was_killed(tmp_path):
    parent_code = (
        "import sys, time; from pathlib import Path; from workers.supervisor.child import Child, Spec\n"
        f"child = Child(Spec('t', (sys.executable, '-c', {POLITE!r}), {{}}, Path({str(tmp_path / 'c.log')!r})))\n"
        "print(child.pid, flush=True); time.sleep(60)"
    )
    parent = subprocess.Popen([sys.executable, "-c", parent_code], stdout=subprocess.PIPE, text=True)
    try:
        child = psutil.Process(int(parent.stdout.readline()))
        until(lambda: "on" in (tmp_path / "c.log").read_text())
    finally:
        parent.kill()
        parent.wait()
        parent.stdout.close()
    _, alive = psutil.wait_procs([child], timeout=5)
    assert alive == []


def test_a_service_that_dies_is_started_again(tmp_path):
    service = Service(spec(tmp_path, POLITE))
    service.start()
    first = service.pid
    os.kill(first, signal.SIGKILL)
    until(lambda: service.pid is None)
    assert "signal 9" in service.keep()
    until(lambda: service.keep() is not None, within_s=3.0)
    assert service.pid not in (None, first)
    stop_all([service.child])


def test_pauses_grow_to_half_a_minute():
    assert [pause_after(n) for n in (0, 1, 2, 3, 7, 50)] == [0.5, 0.5, 1.0, 2.0, 30.0, 30.0]
