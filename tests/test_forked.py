"""What is forked is as what was started by itself: its environment, folder, files, signals and exit status."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path

import psutil
import pytest

from tests.forked import forks

SAYS = """
import os, signal, sys
from random import random
from time import sleep
print(sys.argv[1:], os.environ["SAID"], os.getcwd(), __name__, file=sys.stderr)
print(sorted(map(int, os.listdir("/proc/self/fd")))[:-1], random(), file=sys.stderr)
print('to its output')
print(signal.getsignal(signal.SIGINT) is signal.default_int_handler, file=sys.stderr, flush=True)
if sys.argv[1] == "wait":
    sleep(60)
sys.exit(int(sys.argv[1]))
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "says.py").write_text(SAYS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SAID", "so")
    return tmp_path


def started(*options: str):
    return forks().start("says", options, os.environ)


def test_it_has_what_it_is_told_and_nothing_of_the_others(folder):
    with pytest.MonkeyPatch.context() as patch:
        other = started("wait")
        patch.setenv("SAID", "else")
        one = started("3", "x")
    lines = one.stderr.read().splitlines()
    assert lines[0] == f"['3', 'x'] else {folder} __main__"
    assert lines[1].startswith("[0, 1, 2] ")
    assert lines[2] == "True"
    assert (one.wait(10.0), one.poll()) == (3, 3)
    assert other.stderr.readline() == f"['wait'] so {folder} __main__\n"
    assert other.stderr.readline() != lines[1] + "\n", "each has random numbers of its own"
    other.kill()
    assert other.wait(10.0) == -signal.SIGKILL


def test_one_that_runs_is_waited_for_and_takes_signals(folder):
    one = started("wait")
    assert one.stderr.readline()
    assert one.poll() is None
    with pytest.raises(subprocess.TimeoutExpired):
        one.wait(0.01)
    one.send_signal(signal.SIGTERM)
    assert one.wait(10.0) == -signal.SIGTERM
    assert not psutil.pid_exists(one.pid)
    one.kill()  # as Popen: there is nothing left to kill


def test_a_module_that_is_not_there_says_so(folder):
    one = forks().start("no_such_module", (), os.environ)
    assert "no_such_module" in one.stderr.read()
    assert one.wait(10.0) == 1


def test_all_that_it_writes_goes_to_its_log(folder):
    with (folder / "log").open("wb") as log:
        one = forks().start("says", ("0",), os.environ, log)
    assert one.stderr is None
    assert one.wait(10.0) == 0
    written = (folder / "log").read_text()
    assert "['0'] so " in written
    assert "to its output" in written
