"""Nobody reads what `make up` says any more: a pipe whose reader ended, a terminal that was closed."""

import fcntl
import io
import json
import os
import pty
import signal
import subprocess
import sys
import termios
import time

import psutil
import pytest

from tests.waiting import until
from tests.workers.supervisor.small_system import PROGRAMS, processes_of
from workers.supervisor import plan
from workers.supervisor.announce import say
from workers.supervisor.child import Service, Spec
from workers.supervisor.ownership import LEDGER, Ownership, clear_leftovers
from workers.supervisor.settings import Settings
from workers.supervisor.supervisor import StopFailed, Supervisor

STEADY = set(PROGRAMS) - {"restless"}


class Small:
    """The small system, over one folder."""

    def __init__(self, folder):
        self.folder = folder
        self.process = None

    def start(self, **how):
        command = [sys.executable, "-m", "tests.workers.supervisor.small_system", str(self.folder)]
        self.process = subprocess.Popen(command, cwd=plan.ROOT, **how)

    def until(self, condition):
        until(condition, what=self.log)

    def up(self):
        ledger = self.folder / LEDGER
        self.until(lambda: ledger.exists() and {row["name"] for row in json.loads(ledger.read_text())} >= STEADY)
        self.until(lambda: len(self.mine()) > len(STEADY))  # the worker's child too

    def mine(self):
        """All that were told this folder."""
        return processes_of(self.folder)

    def log(self):
        log = self.folder / "logs" / "supervisor.log"
        return log.read_text() if log.exists() else ""


@pytest.fixture
def small(tmp_path):
    made = Small(tmp_path)
    yield made
    if made.process is not None and made.process.poll() is None:
        made.process.kill()
        made.process.wait()
    for left in made.mine():
        left.kill()


def started_with_a_pipe(small):
    reader, writer = os.pipe()
    small.start(stdout=writer, stderr=writer)
    os.close(writer)
    small.up()
    os.close(reader)  # as `make up | head` does
    small.until(lambda: "not ready yet" in small.log() and "restless ended" in small.log())


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_pipe_without_its_reader_ends_nothing_and_the_stop_is_whole(small, how):
    started_with_a_pipe(small)
    assert small.process.poll() is None
    small.process.send_signal(how)
    assert small.process.wait(timeout=20) == 0
    assert [process.cmdline() for process in small.mine()] == []
    assert "stopped in" in small.log()
    assert not (small.folder / LEDGER).exists()


def test_a_closed_terminal_stops_everything_in_order(small):
    ours, theirs = pty.openpty()

    def own_terminal():
        fcntl.ioctl(theirs, termios.TIOCSCTTY, 0)

    small.start(stdin=theirs, stdout=theirs, stderr=theirs, start_new_session=True, preexec_fn=own_terminal)
    os.close(theirs)
    small.up()
    os.close(ours)
    assert small.process.wait(timeout=20) == 0
    assert [process.cmdline() for process in small.mine()] == []
    assert "stopped in" in small.log()
    assert not (small.folder / LEDGER).exists()


def test_two_hangups_do_not_cut_the_draining_short(tmp_path):
    """Kernel and shell both send SIGHUP when a terminal closes; only a second Ctrl-C means hurry."""
    supervisor = Supervisor(Settings(tmp_path), {})
    for _ in range(2):
        supervisor._on_signal(signal.SIGHUP, None)
    assert (supervisor.signals, supervisor.presses) == (2, 0)
    supervisor._on_signal(signal.SIGINT, None)
    assert (supervisor.signals, supervisor.presses) == (3, 1)


def test_under_nohup_a_closed_terminal_is_no_reason_to_stop(small):
    code = "import signal, sys; from pathlib import Path; from tests.workers.supervisor.small_system import main; "
    code += f"signal.signal(signal.SIGHUP, signal.SIG_IGN); sys.exit(main(Path({str(small.folder)!r})))"
    small.process = subprocess.Popen([sys.executable, "-c", code], cwd=plan.ROOT, stdout=subprocess.DEVNULL)
    small.up()
    supervisor = psutil.Process(small.process.pid)
    before = supervisor.num_ctx_switches().voluntary
    small.process.send_signal(signal.SIGHUP)
    small.until(lambda: supervisor.num_ctx_switches().voluntary >= before + 4)  # its loop has slept that often
    assert small.process.poll() is None
    small.process.send_signal(signal.SIGTERM)
    assert small.process.wait(timeout=20) == 0


def test_a_next_start_clears_what_a_killed_one_left_with_its_pipe(small):
    """All but the supervisor survive here: none of them is asked to end by its parent's death."""
    leader = small_session(small)
    row = {"name": "worker", "pid": leader.pid, "started_at": psutil.Process(leader.pid).create_time()}
    (small.folder / LEDGER).write_text(json.dumps([row]))
    small.until(lambda: len(small.mine()) == 2)
    leader.kill()
    leader.wait()
    [child] = small.mine()  # a prefork child whose worker is gone
    started_with_a_pipe(small)
    assert not child.is_running()
    small.process.send_signal(signal.SIGTERM)
    assert small.process.wait(timeout=20) == 0
    assert small.mine() == []


def small_session(small):
    code = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'import time; time.sleep(60)'])"
    environ = {**os.environ, "DATA_DIR": str(small.folder)}
    return subprocess.Popen([sys.executable, "-c", code], env=environ, start_new_session=True)


def test_children_of_another_folder_are_left_alone(small, tmp_path):
    leader = small_session(small)
    small.until(lambda: len(small.mine()) == 2)
    leader.kill()
    leader.wait()
    other = tmp_path / "other"
    other.mkdir()
    (other / LEDGER).write_text(json.dumps([{"name": "worker", "pid": leader.pid, "started_at": time.time()}]))
    assert clear_leftovers(other) == []
    assert len(small.mine()) == 1


def test_a_stop_that_failed_in_one_step_does_the_others_and_keeps_the_ledger(tmp_path):
    class Unstoppable:
        def stop(self):
            raise OSError("no space left on device")

    argv = (sys.executable, "-c", "import time; time.sleep(60)")
    service = Service(Spec("console", argv, dict(os.environ), tmp_path / "console.log"))
    service.start()
    supervisor = Supervisor(Settings(tmp_path), {})
    supervisor.redis, supervisor.services = Unstoppable(), [service]
    stopped = []
    supervisor.postgres = type("Stoppable", (), {"stop": lambda self: stopped.append("postgres")})()
    ownership = Ownership(tmp_path)
    ownership.record([("redis", os.getpid())])
    with pytest.raises(StopFailed, match="no space left"):
        supervisor._stop()
    ownership.release(all_ended=supervisor.all_ended)
    assert service.pid is None
    assert stopped == ["postgres"]
    assert (tmp_path / LEDGER).exists()


def test_say_never_raises_and_leaves_the_line_in_the_log(tmp_path, monkeypatch):
    closed = io.StringIO()
    closed.close()
    monkeypatch.setattr(sys, "stdout", closed)
    say("the gateway ended")  # and no log to write to
    say("the gateway ended", tmp_path / "logs" / "supervisor.log")
    assert (tmp_path / "logs" / "supervisor.log").read_text().endswith("the gateway ended\n")
    say("the gateway ended", tmp_path / "logs" / "supervisor.log" / "a file is no folder")
