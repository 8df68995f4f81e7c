"""A command whose answer Redis loses: a real Redis behind a connection that is cut when the answer is waited for."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import suppress
from urllib.parse import urlsplit

import orjson
import pytest
import redis
from django.conf import settings

from controller.core.messages import COMMAND_ANSWER_KEY, COMMAND_CHANNEL, GATEWAYS_KEY
from controller.models import Decision

pytestmark = pytest.mark.db

GATEWAY = "gateway-lost"
ASKS = b"BLPOP"  # how the console waits for an answer
LOST = (
    "Redis became unavailable before the answer. No answer for 1 request, which may have been paused, "
    "or may be within 5 seconds. Check the queue for the current state."
)


class Cut:
    """Passes bytes between console and Redis until `word` is about to pass; that connection then breaks."""

    def __init__(self, port: int, word: bytes) -> None:
        self._port, self._word = port, word
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"redis://127.0.0.1:{self._listener.getsockname()[1]}/0"
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._listener.accept()
            except OSError:
                return  # closed
            far = socket.create_connection(("127.0.0.1", self._port))
            for source, target in ((near, far), (far, near)):
                threading.Thread(target=self._pass, args=(source, target), daemon=True).start()

    def _pass(self, source: socket.socket, target: socket.socket) -> None:
        try:
            while (data := source.recv(65_536)) and self._word not in data:
                target.sendall(data)
        except OSError:
            pass  # the other half was cut
        for each in (source, target):
            with suppress(OSError):  # is already
                each.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._listener.close()


@pytest.fixture
def board(redis_server) -> Iterator[redis.Redis]:
    """A gateway is known and listens: what it hears is read by the test."""
    client = redis.Redis.from_url(settings.REDIS_URL)
    client.flushdb()
    client.sadd(GATEWAYS_KEY, GATEWAY)
    yield client
    client.flushdb()


@pytest.fixture
def heard(board):
    pubsub = board.pubsub(ignore_subscribe_messages=True)
    pubsub.subscribe(COMMAND_CHANNEL.format(gateway=GATEWAY))
    assert pubsub.get_message(timeout=5) is None  # that it is subscribed
    yield lambda: [orjson.loads(each["data"]) for each in iter(lambda: pubsub.get_message(timeout=1), None)]
    pubsub.close()


@pytest.fixture
def cut(board, settings) -> Iterator[None]:
    line = Cut(urlsplit(settings.REDIS_URL).port or 0, ASKS)
    settings.REDIS_URL = line.url
    yield
    line.close()


@pytest.mark.usefixtures("cut")
def test_a_command_that_was_told_and_whose_answer_is_lost_is_not_called_undone(operator, heard):
    said = operator.post("/queue/command/", {"kind": "pause", "request": ["req-1"]})
    (command,) = heard()
    assert (command["kind"], command["request_ids"]) == ("pause", ["req-1"])  # so it may well have been done
    assert (said.status_code, said.json()["message"]) == (503, LOST)
    outcome = Decision.objects.get(kind="queue_pause").outcome
    assert (outcome["unanswered"], outcome["gone"], outcome["applied"]) == (["req-1"], [], [])
    assert "Redis became unavailable" in outcome["error"]


@pytest.mark.usefixtures("cut")
def test_the_control_api_says_so_too(operator, heard):
    answer = operator.post("/api/v1/queue/pause", {"request_ids": ["req-1"]}, content_type="application/json")
    assert len(heard()) == 1
    assert answer.status_code == 503
    assert "may have taken effect" in answer.json()["error"]["message"]
    assert Decision.objects.get(kind="queue_pause").outcome["unanswered"] == ["req-1"]


def test_a_gateway_that_hears_and_says_nothing_is_silent(operator, board, heard):
    """Another has answered: what is not with that one may be with the silent one."""
    said = operator.post("/queue/command/", {"kind": "cancel", "request": ["req-1"]})
    (command,) = heard()
    assert board.exists(COMMAND_ANSWER_KEY.format(command=command["id"])) == 0
    assert said.status_code == 503
    unknown = "No gateway answered in time. No answer for 1 request, which may have been cancelled"
    assert unknown in said.json()["message"]
    assert Decision.objects.get(kind="queue_cancel").outcome["gone"] == []
