"""The embedded servers: start, survive a kill, keep their data, stop, and leave nothing behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import psycopg
import pytest

from workers.supervisor.embedded import EmbeddedError, EmbeddedPostgres, EmbeddedRedis

pytestmark = pytest.mark.db
FAST = {"fsync": "off"}


@pytest.fixture
def folder(service_dir: Path, request: pytest.FixtureRequest) -> Path:
    """Below a folder that a system user may enter (pytest's own temporary ones are private)."""
    return service_dir / f"embedded-{request.node.name.replace('[', '-').strip(']')[:40]}"


@pytest.fixture
def server(folder: Path) -> Iterator[EmbeddedPostgres]:
    own = EmbeddedPostgres(folder, options=FAST)
    own.start()
    yield own
    own.stop()


def run(server: EmbeddedPostgres, statement: str) -> list[tuple]:
    with psycopg.connect(server.url, autocommit=True) as connection:
        cursor = connection.execute(statement)
        return cursor.fetchall() if cursor.description else []


def test_data_outlive_a_stop_and_the_port_may_change(folder, server):
    run(server, "CREATE TABLE kept AS SELECT 42 AS answer")
    server.stop()
    assert not server.ready()

    again = EmbeddedPostgres(folder, options=FAST)
    again.start()
    try:
        assert run(again, "SELECT answer FROM kept") == [(42,)]
    finally:
        again.stop()


def test_it_comes_back_after_kill_9_of_the_postmaster(server):
    run(server, "CREATE TABLE kept AS SELECT 42 AS answer")
    first = server.pid
    os.kill(first, signal.SIGKILL)
    psutil.wait_procs([psutil.Process(first)], timeout=5)

    assert not server.alive()
    server.start()

    assert server.pid != first
    assert run(server, "SELECT answer FROM kept") == [(42,)]


def test_a_pid_file_that_names_another_program_does_not_stop_it(folder, server):
    server.stop()
    pid_file = server.cluster / "postmaster.pid"
    pid_file.write_text(f"{os.getpid()}\n{server.cluster}\n")
    os.chown(pid_file, server.cluster.stat().st_uid, -1)

    again = EmbeddedPostgres(folder, options=FAST)
    again.start()
    assert again.alive()
    again.stop()


def test_two_owners_of_one_folder_are_refused(folder, server):
    with pytest.raises(EmbeddedError, match="another process runs the postgres"):
        EmbeddedPostgres(folder).start()


def test_only_loopback_listens(server):
    listening = {entry.laddr.ip for entry in psutil.Process(server.pid).net_connections() if entry.status == "LISTEN"}

    assert listening == {"127.0.0.1"}


def test_a_server_that_cannot_start_says_why(folder):
    server = EmbeddedPostgres(folder, options={**FAST, "shared_buffers": "nonsense"})

    with pytest.raises(EmbeddedError, match="nonsense"):
        server.start(timeout_s=1.0)
    assert not server.alive()


def test_redis_answers_and_forgets(folder):
    server = EmbeddedRedis(folder)
    server.start()
    assert server.ready()
    assert server.url == f"redis://127.0.0.1:{server.port}/0"
    server.stop()
    server.stop()
    assert not server.ready()


OWNER = """
import sys, time
from workers.supervisor.embedded import EmbeddedPostgres, EmbeddedRedis
servers = [EmbeddedPostgres(sys.argv[1]), EmbeddedRedis(sys.argv[1])]
for server in servers:
    server.start()
print(*(server.pid for server in servers), flush=True)
time.sleep(60)
"""


def test_kill_9_of_the_owner_leaves_nothing_behind(folder):
    owner = subprocess.Popen([sys.executable, "-c", OWNER, str(folder)], stdout=subprocess.PIPE, text=True)
    servers = [psutil.Process(int(pid)) for pid in owner.stdout.readline().split()]

    owner.kill()
    owner.wait()

    _, left = psutil.wait_procs(servers, timeout=10)
    assert left == []
    again = EmbeddedPostgres(folder)
    started = time.monotonic()
    again.start()
    again.stop()
    assert time.monotonic() - started < 15
