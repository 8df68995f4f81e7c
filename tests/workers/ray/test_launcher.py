"""Which program the launcher of a Ray job starts, and what its control port bears."""

from __future__ import annotations

import contextlib
import http.client
import json
import socket
import sys
import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest

from tests.waiting import until
from workers.ray import launcher
from workers.ray.launcher import EngineOutput, EngineRun, StartRefused

ORDER: dict[str, Any] = {"command": ["engine"], "environment": {}, "secrets": {}, "health_path": "/health"}


@pytest.fixture
def beside(tmp_path, monkeypatch):
    """A program of that name in the job's working folder, and in no folder of PATH."""
    program = tmp_path / "engine"
    program.write_text("#!/bin/sh\nexit 0\n")
    program.chmod(0o755)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", "/nowhere")
    return tmp_path


@pytest.mark.parametrize("path", ["/nowhere", "/nowhere:", ":/nowhere"])
@pytest.mark.parametrize("told", [None, "", ":/opt", "/opt::/usr"])
def test_the_working_folder_of_a_job_is_not_searched(beside, monkeypatch, told, path):
    monkeypatch.setenv("PATH", path)
    monkeypatch.delenv("ENGINE_PATH", raising=False)
    if told is not None:
        monkeypatch.setenv("ENGINE_PATH", told)
    with pytest.raises(StartRefused, match="engine was not found"):
        EngineRun(ORDER, "127.0.0.1", 1, "")


def test_engine_path_is_searched_first(beside, monkeypatch):
    monkeypatch.setenv("ENGINE_PATH", str(beside))
    run = EngineRun(ORDER, "127.0.0.1", 1, "")
    assert run.process.wait(timeout=10) == 0


class Printed:
    """What an engine printed, as a pipe gives it."""

    def __init__(self, text: str) -> None:
        self.rest = text.encode()

    def readline(self, most: int) -> bytes:
        end = min(most, self.rest.find(b"\n") + 1 or most)
        line, self.rest = self.rest[:end], self.rest[end:]
        return line


@pytest.mark.parametrize("before", [0, 1, 5, 9, 10, 11])
def test_a_secret_in_a_line_that_is_read_in_parts_is_in_no_log(monkeypatch, before):
    """A dump of a configuration has no end of line for more than what is read at once."""
    monkeypatch.setattr(launcher, "LOG_BYTES", 10)
    output = EngineOutput({})
    output.hidden = ["hf_secret"]
    output.read(Printed("." * before + "hf_secret,hf_sec"))
    monkeypatch.setattr(launcher, "LOG_BYTES", 1000)
    kept = "".join(output.lines)
    assert "hf_secret" not in "".join(output.lines)
    assert kept.endswith(",hf_sec"), "the beginning of one is none"


def test_secrets_are_hidden_in_each_way_of_writing_them(tmp_path, monkeypatch):
    (tmp_path / "hf").write_text('the "k\u00e9y"')
    monkeypatch.setenv("ENGINE_SECRETS_DIR", str(tmp_path))
    prints = "import os, json; t = os.environ['T']; print(t, json.dumps(t), json.dumps(t, ensure_ascii=False), repr(t))"
    order = {**ORDER, "command": [sys.executable, "-c", prints], "secrets": {"T": "hf"}}
    run = EngineRun(order, "127.0.0.1", 1, "")
    run.process.wait(timeout=20)
    run.reader.join(20)
    assert "".join(run.output.lines).split() == ["[secret]", '"[secret]"', '"[secret]"', "'[secret]'"]


@pytest.fixture
def control(monkeypatch):
    """A control server, and the port that it listens at."""
    monkeypatch.setattr(launcher, "CALL_S", 0.5)
    known = SimpleNamespace(order={"token_sha256": "ab"}, allows=lambda shown: False)
    server = launcher.ControlServer(("127.0.0.1", 0), launcher.handler_of(known))
    serving = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    serving.start()
    yield server, server.server_address[1]
    server.shutdown()
    server.server_close()
    serving.join()


def strangers(port, number, sends=b"GET /whose HTTP/1.1\r\n"):
    opened = []
    for _ in range(number):
        opened.append(socket.create_connection(("127.0.0.1", port), timeout=5))
        with contextlib.suppress(OSError):
            opened[-1].sendall(sends)
    return opened


def whose(port):
    """As a worker asks, from another address than the strangers."""
    caller = http.client.HTTPConnection("127.0.0.1", port, timeout=2, source_address=("127.0.0.2", 0))
    caller.request("GET", "/whose")
    return caller.getresponse().status


def test_strangers_who_hold_connections_leave_room_for_workers(control):
    server, port = control
    opened = strangers(port, 200)
    until(lambda: server.open["127.0.0.1"] == launcher.CALLS_OF_ADDRESS)
    assert whose(port) == 200
    assert sum(server.open.values()) <= launcher.CALLS_OF_ADDRESS + 1
    for each in opened:
        each.close()


def test_a_call_that_drips_is_cut_off(control):
    server, port = control
    [dripping] = strangers(port, 1)
    began = time.monotonic()
    with contextlib.suppress(OSError):
        while time.monotonic() - began < 5:
            time.sleep(0.05)
            dripping.sendall(b"x")
    assert time.monotonic() - began < 3
    until(lambda: not server.open)
    assert whose(port) == 200


@pytest.fixture
def kept(control, monkeypatch):
    """A connection of a worker that shows the token, to a launcher that knows what it was told."""
    server, port = control
    monkeypatch.setattr(launcher, "CALL_S", 2.0)
    known = SimpleNamespace(order={"token_sha256": "ab"}, allows=lambda shown: shown == "Bearer t", told=[])
    known.lease = known.end = known.told.append
    known.status = lambda: {"leases": len(known.told)}
    server.RequestHandlerClass = launcher.handler_of(known)
    caller = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    yield caller
    caller.close()


def asked(caller, method, path, body=None, token="t", headers=()):
    caller.request(method, path, body, {"Authorization": f"Bearer {token}", **dict(headers)})
    answer = caller.getresponse()
    return answer.status, answer.read(), answer.will_close


def test_a_worker_keeps_its_connection_for_longer_than_a_call(kept):
    kept.connect()
    connected = kept.sock
    for number in range(6):
        assert asked(kept, "POST", "/lease", "{}") == (200, b'{"leases": %d}' % (number + 1), False)
        assert asked(kept, "GET", "/status")[::2] == (200, False)
        time.sleep(launcher.CALL_S / 4)
    assert kept.sock is connected


def test_a_connection_that_is_kept_and_idle_is_closed(kept, control):
    asked(kept, "GET", "/status")
    until(lambda: not control[0].open, 20)
    assert kept.sock.recv(1) == b""


@pytest.mark.parametrize(
    ("method", "path", "named"),
    [
        ("GET", "/whose", {}),
        ("GET", "/status", {"token": "wrong"}),
        ("GET", "/nothing", {}),
        ("POST", "/lease", {"body": "{broken"}),
        ("POST", "/lease", {"body": json.dumps({"key": "k" * launcher.LOG_BYTES})}),
        ("GET", "/status", {"body": "unread"}),
        ("GET", "/status", {"headers": {"Transfer-Encoding": "chunked"}}),
        ("GET", "/status", {"headers": {"Connection": "close"}}),
    ],
)
def test_strangers_and_calls_that_were_not_read_to_their_end_keep_no_connection(kept, method, path, named):
    """What follows on it would be taken for another call, and whoever may not call has the time of one."""
    assert asked(kept, method, path, **named)[2]
    assert kept.sock is None
