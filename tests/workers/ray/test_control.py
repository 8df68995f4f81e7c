"""What answers at a launcher's port may be no launcher."""

from __future__ import annotations

import hashlib
import json

import pytest

from tests.workers.http.test_kept_calls import hangs
from tests.workers.http.test_wire import Answer, Server, close
from workers.ray import control
from workers.ray.control import LauncherClient, LauncherGone, LauncherUnreachable, Stranger, control_port
from workers.ray.launches import control_token

TOKEN = "fleet-token-of-the-test"
MAIL = b"220 mail.example ESMTP\r\n"
PAGE = b"HTTP/1.1 200 OK\r\ncontent-length: 6\r\n\r\n<html>"


def port_of(server: Server) -> int:
    return int(server.url.rpartition(":")[2])


def whose(id: str) -> bytes:
    digest = hashlib.sha256(control_token(TOKEN, id, "1.0").encode()).hexdigest()
    body = json.dumps({"token_sha256": digest}).encode()
    return b"HTTP/1.0 200 OK\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body)


@pytest.mark.parametrize("answer", [MAIL, PAGE, whose("another")])
async def test_a_launcher_is_found_beside_whatever_else_listens(answer: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    async with Server(answer, answer) as other, Server(whose("e1"), whose("e1")) as ours, Server() as gone:
        await gone.__aexit__()
        ports = [port_of(each) - 1 for each in (gone, other, ours)]
        monkeypatch.setattr(control, "ports_of", lambda id: ports)
        monkeypatch.setattr(control, "FIND_S", 60.0)
        assert await control_port("e1", "1.0", "127.0.0.1", TOKEN) == port_of(ours)
        assert await control_port("e1", "1.0", "127.0.0.1", TOKEN.upper()) is None


@pytest.mark.parametrize("answer", [close, hangs])
async def test_a_port_that_does_not_answer_hides_no_launcher(answer: Answer, monkeypatch: pytest.MonkeyPatch) -> None:
    """As that of a process that speaks gRPC, of which a node has many."""
    async with Server(answer, answer) as other, Server(whose("e1"), whose("e1")) as ours:
        monkeypatch.setattr(control, "ports_of", lambda id: [port_of(other) - 1, port_of(ours) - 1])
        monkeypatch.setattr(control, "FIND_S", 0.5 if answer is hangs else 60.0)
        assert await control_port("e1", "1.0", "127.0.0.1", TOKEN) == port_of(ours)
        with pytest.raises(LauncherUnreachable):
            await control_port("e1", "1.0", "127.0.0.1", TOKEN.upper())


@pytest.mark.parametrize("answer", [MAIL, PAGE])
async def test_a_call_to_something_else_is_told(answer: bytes) -> None:
    async with Server(answer) as other:
        with pytest.raises(Stranger, match="is no launcher"):
            await LauncherClient("e1", "1.0", "127.0.0.1", port_of(other), TOKEN).status()


async def test_a_launcher_that_has_ended_is_told_from_one_that_must_not_be_called(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with Server() as server:
        client = LauncherClient("e1", "1.0", "127.0.0.1", port_of(server), TOKEN)
    with pytest.raises(LauncherGone):
        await client.lease()
    monkeypatch.setenv("ENGINE_NETWORKS", "10.0.0.0/8")
    with pytest.raises(LauncherUnreachable, match="ENGINE_NETWORKS"):
        await client.lease()
