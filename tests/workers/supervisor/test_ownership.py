"""One supervisor a folder, nothing left over, and ports that are busy."""

import json
import os
import signal
import socket
import subprocess
import sys

import psutil
import pytest

from controller.core.errors import ConfigError
from workers.supervisor.engine_processes import MARK
from workers.supervisor.ownership import LEDGER, OWNER, Ownership, clear_leftovers, running_owner, stop_owner
from workers.supervisor.ports import HOST, free_port, is_free, require_free


@pytest.fixture
def sleeper():
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"], start_new_session=True)
    yield process
    process.kill()
    process.wait()


def test_a_second_supervisor_is_refused_and_told_who_is_there(tmp_path):
    first = Ownership(tmp_path)
    with pytest.raises(ConfigError, match=f"already runs with .*pid {os.getpid()}"):
        Ownership(tmp_path)
    first.release(all_ended=True)
    Ownership(tmp_path).release(all_ended=True)


def test_what_a_killed_supervisor_left_is_ended(tmp_path, sleeper):
    row = {"name": "engine a", "pid": sleeper.pid, "started_at": psutil.Process(sleeper.pid).create_time()}
    (tmp_path / LEDGER).write_text(json.dumps([row]))
    assert clear_leftovers(tmp_path) == [f"engine a (pid {sleeper.pid})"]
    assert not psutil.pid_exists(sleeper.pid)


def test_what_an_engine_started_in_a_session_of_its_own_is_ended_too(tmp_path):
    """It outlives the engine, which ends with its supervisor, and may hold its devices."""
    folders = {"ours": tmp_path / "a", "of another supervisor": tmp_path / "ab"}
    code = [sys.executable, "-c", "import time; time.sleep(60)"]
    started = {
        name: subprocess.Popen(code, env={**os.environ, MARK: f"{folder}/engines/vllm-1"}, start_new_session=True)
        for name, folder in folders.items()
    }
    try:
        assert clear_leftovers(folders["ours"]) == [f"a process of engine vllm-1 (pid {started['ours'].pid})"]
        assert started["ours"].wait(timeout=5) == -signal.SIGKILL
        assert started["of another supervisor"].poll() is None
    finally:
        for process in started.values():
            process.kill()
            process.wait()


def test_a_pid_that_belongs_to_somebody_else_now_is_left_alone(tmp_path, sleeper):
    row = {"name": "engine a", "pid": sleeper.pid, "started_at": psutil.Process(sleeper.pid).create_time() - 60}
    (tmp_path / LEDGER).write_text(json.dumps([row]))
    assert clear_leftovers(tmp_path) == []
    assert sleeper.poll() is None


def test_a_session_that_has_the_number_now_is_left_alone_though_it_names_this_folder(tmp_path):
    """A login shell after a restart of the machine, say, in which `make up` is called."""
    code = [sys.executable, "-c", "import time; time.sleep(60)"]
    shell = subprocess.Popen(code, env={**os.environ, "DATA_DIR": str(tmp_path)}, start_new_session=True)
    try:
        row = {"name": "worker", "pid": shell.pid, "started_at": psutil.Process(shell.pid).create_time() - 60}
        (tmp_path / LEDGER).write_text(json.dumps([row]))
        assert clear_leftovers(tmp_path) == []
        assert shell.poll() is None
    finally:
        shell.kill()
        shell.wait()


def test_down_stops_the_one_that_runs(tmp_path, sleeper):
    row = {"pid": sleeper.pid, "started_at": psutil.Process(sleeper.pid).create_time()}
    (tmp_path / OWNER).write_text(json.dumps(row))
    assert running_owner(tmp_path).pid == sleeper.pid
    assert "stopped" in stop_owner(tmp_path, timeout_s=5)
    assert "no supervisor runs" in stop_owner(tmp_path, timeout_s=5)


def test_other_users_cannot_list_a_new_data_folder_and_an_existing_one_is_left_as_it_is(tmp_path):
    new, known = tmp_path / "new", tmp_path / "known"
    known.mkdir(mode=0o750)
    for folder in (new, known):
        Ownership(folder).release(all_ended=True)
    assert (new.stat().st_mode & 0o777, known.stat().st_mode & 0o777) == (0o711, 0o750)


def test_a_busy_port_names_the_variable():
    with socket.socket() as busy:
        busy.bind((HOST, 0))
        busy.listen()
        port = busy.getsockname()[1]
        assert not is_free(port)
        with pytest.raises(ConfigError, match=f"port {port} is in use.*GATEWAY_PORT="):
            require_free(port, "GATEWAY_PORT")
    assert is_free(free_port())
