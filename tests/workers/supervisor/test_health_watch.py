"""Health checks that nobody waits for, against servers that answer, refuse, trickle and hang."""

import socket
import time

import pytest

from tests.waiting import until
from workers.supervisor import health_watch
from workers.supervisor.health_watch import HealthWatch

GOOD = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}"


@pytest.fixture
def server():
    with socket.create_server(("127.0.0.1", 0)) as listening:
        listening.settimeout(5)
        yield listening


def watching(server, **headers):
    return HealthWatch(server.getsockname()[1], "/ready", headers, 0.0)


def checked(watch, server, at, answer):
    """One check at this time; the answer closes the connection."""
    watch.error(at)
    call, _ = server.accept()
    with call:
        asked = call.recv(4096)
        for part in answer:
            call.sendall(part)
            watch.error(at + 0.1)
    until(lambda: watch.error(at + 0.2) is not None and watch._call is None)
    return asked


def failing(watch, at):
    """As the checks say, without beginning one."""
    began, watch._began = watch._began, at
    said, watch._began = watch.error(at), began
    return said


def test_a_check_has_the_engines_path_and_key(server):
    asked = checked(watching(server, Authorization="Bearer k"), server, 2.0, [GOOD])
    assert asked.startswith(b"GET /ready HTTP/1.1\r\n")
    assert b"\r\nAuthorization: Bearer k\r\n" in asked


@pytest.mark.parametrize("answer", [[b"HTTP/1.1 503 No\r\n\r\n"], [b"SSH-2.0 200 \r\n"], [b""], [b"HTTP/1.1 2"]])
def test_two_checks_without_a_good_answer_in_ten_seconds_are_a_failure(server, answer):
    watch = watching(server)
    checked(watch, server, 3.0, answer)
    assert failing(watch, 10.5) == "", "one check is not enough"
    checked(watch, server, 6.0, answer)
    assert failing(watch, 9.9) == ""
    assert failing(watch, 10.1) == "GET /ready has not been answered with status 200 for 10 s"
    checked(watch, server, 11.0, [GOOD[:11], GOOD[11:]])
    assert failing(watch, 11.3) == ""


def test_an_engine_that_hangs_is_asked_again_and_again_and_never_waited_for(server):
    watch = watching(server)
    began = time.monotonic()
    said = [watch.error(at / 4) for at in range(100)]  # it accepts and does not answer
    assert time.monotonic() - began < 1.0
    assert said[47] == "", "two seconds, then two checks of five"
    assert said[50].startswith("GET /ready")
    watch.close()


def test_a_watcher_that_stalled_itself_does_not_doubt_the_engine(server):
    watch = watching(server)
    watch.error(2.0)
    call, _ = server.accept()
    with call:
        call.sendall(GOOD)
    until(lambda: watch.error(300.0) == "" and watch._call is None)
    assert watch.error(301.0) == ""


def test_nothing_that_listens_is_a_failure(server):
    watch = watching(server)
    server.close()
    said = [watch.error(at / 4) for at in range(60)]
    assert (said[40], bool(said[48])) == ("", True)


def test_an_answer_without_end_is_read_in_part(server, monkeypatch):
    monkeypatch.setattr(health_watch, "MOST_BYTES", 100)
    checked(watching(server), server, 2.0, [GOOD + b"x" * 1000])
