"""Engines and gateways that are forked from a process that has imported what they need: one that starts by itself
takes more than a second of a core to import it.

`python -m tests.forked` is that process. `Forks` is its other end, one in each process of tests; it sends a packet of
JSON for each start, with the file descriptors that the started one and its exit status write to. What a test starts so
runs as by `python -m MODULE`; that this itself works is for tests of the supervisor and for those that say `-m`.
"""

from __future__ import annotations

import gc
import json
import os
import runpy
import select
import signal
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any, BinaryIO, TextIO

ROOT = Path(__file__).parents[1]
STATUS = struct.Struct("i")
MOST = 1 << 17  # bytes of a packet: options and a whole environment
# What is imported before the first fork of a module. Nothing of it may read the environment or begin a thread.
ENGINE = ("uvloop", "workers.engine.server")
BEFORE = {
    "workers.engine": ENGINE,
    "tests.workers.engine.held": ENGINE,
    "api.openai": (
        "uvloop",
        "psycopg",
        "django.db.models",
        "api.openai.app",
        "api.openai.server",
        "api.openai.service",
    ),
}


class Forked:
    """Its process, with what tests use of `subprocess.Popen`. `stderr`: None if it writes to a file."""

    def __init__(self, pid: int, stderr: TextIO | None, status: int) -> None:
        self.pid, self.stderr, self._status = pid, stderr, status
        self.returncode: int | None = None

    def poll(self) -> int | None:
        return self._ended(0.0)

    def wait(self, timeout: float | None = None) -> int:
        """Raises subprocess.TimeoutExpired."""
        found = self._ended(timeout)
        if found is None:
            raise subprocess.TimeoutExpired(str(self.pid), timeout or 0.0)
        return found

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def _ended(self, within_s: float | None) -> int | None:
        if self.returncode is None and select.select([self._status], [], [], within_s)[0]:
            told = os.read(self._status, STATUS.size)
            self.returncode = STATUS.unpack(told)[0] if told else -signal.SIGKILL  # nobody is left to tell
            os.close(self._status)
        return self.returncode


class Forks:
    """It ends with the process that made it."""

    def __init__(self) -> None:
        self._socket, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with other:
            command = [sys.executable, "-m", __name__, str(other.fileno())]
            alone = {**os.environ, "OPENBLAS_NUM_THREADS": "1"}  # numpy would begin threads, and no fork has them
            self._process = subprocess.Popen(command, cwd=ROOT, env=alone, pass_fds=[other.fileno()])
        self._lock = threading.Lock()

    def start(
        self, module: str, options: Sequence[str], environment: Mapping[str, str], log: BinaryIO | None = None
    ) -> Forked:
        """As `python -m module options` with that environment. `log`: takes its output; None: a pipe takes its
        errors."""
        asked = {"argv": [module, *options], "environment": dict(environment), "folder": os.getcwd()}
        asked["outputs"] = [1, 2] if log else [2]
        seen, output = os.pipe() if log is None else (None, log.fileno())
        status, told = os.pipe()
        try:
            with self._lock:
                socket.send_fds(self._socket, [json.dumps(asked).encode()], [output, told])
                pid = STATUS.unpack(self._socket.recv(STATUS.size))[0]
        finally:
            os.close(told)
            if log is None:
                os.close(output)
        stderr = None if seen is None else os.fdopen(seen, encoding="utf-8", errors="replace")
        return Forked(pid, stderr, status)


@cache
def forks() -> Forks:
    return Forks()


def serve(control: socket.socket) -> None:
    """Fork until the other end is closed. Returns in each fork, with its module and options in `sys.argv`."""
    ended, told = os.pipe()
    os.set_blocking(told, False)
    signal.set_wakeup_fd(told)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the tests and for what they started
    status_of: dict[int, int] = {}
    while True:
        ready = select.select([control, ended], [], [])[0]
        if ended in ready:
            os.read(ended, 4096)
            reap(status_of)
        if control not in ready:
            continue
        packet, given, _, _ = socket.recv_fds(control, MOST, 2)
        if not packet:
            sys.exit()
        asked, (output, status) = json.loads(packet), given
        for name in BEFORE.get(asked["argv"][0], ()):
            import_module(name)
        gc.freeze()
        pid = os.fork()
        if pid == 0:
            control.detach()
            become(asked, output)
            return
        os.close(output)
        status_of[pid] = status
        control.send(STATUS.pack(pid))


def reap(status_of: dict[int, int]) -> None:
    """Tell who waits how a fork has ended."""
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if pid == 0:
            return
        where = status_of.pop(pid)
        with suppress(BrokenPipeError):  # nobody waits any more
            os.write(where, STATUS.pack(os.waitstatus_to_exitcode(status)))
        os.close(where)


def become(asked: dict[str, Any], output: int) -> None:
    """A process as if it had been started by itself."""
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for each in asked["outputs"]:
        os.dup2(output, each)
    for each in os.listdir("/proc/self/fd"):
        if int(each) > 2:
            with suppress(OSError):  # that of the listing itself
                os.close(int(each))
    os.chdir(asked["folder"])
    os.environ.clear()
    os.environ.update(asked["environment"])
    sys.path.insert(0, asked["folder"])
    sys.argv = asked["argv"]


def main() -> None:
    serve(socket.socket(fileno=int(sys.argv[1])))
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
