"""Gateway, console and engine as they are started, each as a process: a stranger meets the limits, with their settings,
before anything else."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.waiting import until
from tests.workers.engine.process import EngineProcess
from workers.http.limits import LIMITS
from workers.supervisor.plan import console_module
from workers.supervisor.ports import free_port

MOST = 20  # headers of a request, for these processes


def answered(port: int, head: bytes) -> int:
    with socket.create_connection(("127.0.0.1", port), timeout=10) as connection:
        connection.sendall(head + b"\r\n")
        return int(connection.recv(4096).split()[1])


def status(port: int, headers: int) -> int:
    """Of an answer to a request with so many headers."""
    few = b"GET /livez HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"
    return answered(port, few + b"a: b\r\n" * (headers - 2))


def listens(process: subprocess.Popen[bytes], port: int) -> bool:
    assert process.poll() is None, "it ended by itself"
    try:
        return status(port, 2) == 200
    except OSError:
        return False


@contextmanager
def started(folder: Path, port: int, *program: str) -> Iterator[int]:
    with (folder / "log").open("wb") as log:
        told = {**os.environ, "DATA_DIR": str(folder), "SLACKLINE_ROLE": "console"}
        told["DJANGO_SETTINGS_MODULE"] = "console.settings"
        process = subprocess.Popen([sys.executable, "-m", *program], env=told, stdout=log, stderr=log)
    try:
        until(lambda: listens(process, port), 30)
        yield port
    finally:
        process.kill()
        process.wait()


@contextmanager
def gateway(folder: Path) -> Iterator[int]:
    snapshot, port = folder / "configuration.json", free_port()
    snapshot.write_text("{}")
    with started(folder, port, "api.openai", "--port", str(port), "--snapshot", str(snapshot)) as found:
        yield found


@contextmanager
def console(folder: Path) -> Iterator[int]:
    port = free_port()
    with started(folder, port, *console_module(port)) as found:
        yield found


@contextmanager
def engine(folder: Path) -> Iterator[int]:
    with EngineProcess("--profile", "constant:2ms") as process:
        yield int(process.url.rpartition(":")[2])


@pytest.mark.parametrize("server", [gateway, console, engine])
def test_a_stranger_meets_the_limits_of_every_server(server, tmp_path, monkeypatch):
    monkeypatch.setenv("HTTP_HEADERS", str(MOST))
    with server(tmp_path) as port:
        assert status(port, MOST) == 200
        assert status(port, MOST + 1) == 431


def test_a_console_has_the_limits_of_a_console(tmp_path):
    """An engine takes larger bodies."""
    size = LIMITS["console"].body_bytes + 1
    with console(tmp_path) as port:
        assert answered(port, b"POST /login/ HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n" % size) == 413
