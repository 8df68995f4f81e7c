"""Calls that are made again every second: connections are kept, and what one of them gets wrong proves nothing."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Awaitable, Callable
from types import SimpleNamespace

import pytest
import requests

from tests.waiting import until_on_loop
from tests.workers.http.test_wire import CHUNKED, OK, Server, close
from workers.http import kept_calls, outbound, wire
from workers.http.kept_calls import BrokenAnswer, get, nobody_listens, request

LONG_S = 60.0  # however slow the test's machine: nothing here waits for it
REDIRECT = b"HTTP/1.1 302 Found\r\nLocation: http://127.0.0.1:1/secret\r\ncontent-length: 0\r\n\r\n"


async def hangs(server: Server, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await reader.read()


async def resets(server: Server, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    writer.transport.abort()


async def floods(server: Server, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    writer.write(CHUNKED)
    try:
        while True:
            writer.write(b"10000\r\n" + bytes(1 << 16) + b"\r\n")
            await writer.drain()
    except ConnectionError:
        return


async def test_one_connection_serves_one_call_after_the_other() -> None:
    async with Server(*[OK] * 5) as server:
        for _ in range(5):
            answer = await get(
                f"{server.url}/base/health?deep=1", timeout_s=LONG_S, headers={"Authorization": "Bearer x"}
            )
        assert (answer.status_code, answer.headers["x-name"], answer.text) == (200, "Value", "hi")
        assert server.connections == 1
        assert server.requests[0].startswith(b"GET /base/health?deep=1 HTTP/1.1\r\n")
        assert server.requests[0].count(b"Authorization: Bearer x\r\n") == 1


async def test_a_post_has_a_connection_of_its_own_since_it_is_not_repeated() -> None:
    async with Server(OK, OK, close) as server:
        await get(server.url, timeout_s=LONG_S)
        await request("POST", server.url, timeout_s=LONG_S, json={"a": 1})
        assert server.connections == 2
        assert server.requests[1].endswith(b'\r\n\r\n{"a": 1}')
        with pytest.raises(requests.ConnectionError):
            await request("POST", server.url, timeout_s=LONG_S, json={})
        assert len(server.requests) == 3


async def test_a_post_that_may_be_repeated_is_made_as_a_get() -> None:
    async with Server(OK, OK, close, OK) as server:
        for connections in (1, 1, 2):
            assert (await request("POST", server.url, timeout_s=LONG_S, json={}, repeatable=True)).text == "hi"
            assert server.connections == connections
        assert len(server.requests) == 4


@pytest.mark.parametrize("fails", [close, resets, b"-ERR unknown command\r\n"])
async def test_a_kept_connection_that_fails_is_asked_once_again_on_a_new_one(fails: object) -> None:
    """As of an engine that was started again, or that closes what is idle as it is asked."""
    async with Server(OK, fails, OK) as server:  # type: ignore[arg-type]
        assert (await get(server.url, timeout_s=LONG_S)).text == "hi"
        assert (await get(server.url, timeout_s=LONG_S)).text == "hi"
        assert (server.connections, len(server.requests)) == (2, 3)


async def test_a_kept_connection_whose_other_end_is_gone_without_a_word_is_asked_once_again() -> None:
    """As of an engine that runs elsewhere now, at the same name."""
    async with Server(OK, hangs, OK) as server:
        await get(server.url, timeout_s=LONG_S)
        assert (await get(server.url, timeout_s=0.2)).text == "hi"
        assert server.connections == 2


@pytest.mark.parametrize("fails", [close, resets])
async def test_a_new_connection_that_fails_is_asked_once(fails: object) -> None:
    async with Server(fails, OK) as server:  # type: ignore[arg-type]
        with pytest.raises(requests.ConnectionError) as caught:
            await get(server.url, timeout_s=LONG_S)
        assert not nobody_listens(caught.value)
        assert len(server.requests) == 1


async def test_an_engine_that_closes_idle_connections_is_none_the_worse(monkeypatch: pytest.MonkeyPatch) -> None:
    """After less time than ours, which is less than that of uvicorn."""
    async with Server(OK, OK, OK) as server:
        for _ in range(3):
            assert (await get(server.url, timeout_s=LONG_S)).text == "hi"
            server.writers[-1].close()
            await asyncio.sleep(0.01)
        assert server.connections == 3


@pytest.mark.parametrize(
    ("answer", "error"),
    [
        (hangs, requests.ReadTimeout),
        (b"220 mail.example ESMTP\r\n", BrokenAnswer),
        (REDIRECT, outbound.UnboundedAnswer),
        (floods, outbound.UnboundedAnswer),
        (b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\nhi", requests.ReadTimeout),
    ],
)
async def test_what_is_no_answer_is_an_error_of_requests(
    answer: bytes | Callable[..., Awaitable[None]], error: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(outbound, "MOST_BYTES", 1 << 20)
    async with Server(answer) as server:  # type: ignore[arg-type]
        with pytest.raises(error):
            await get(server.url, timeout_s=0.3 if error is requests.ReadTimeout else LONG_S)
        assert server.connections == 1


async def test_an_answer_that_drips_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outbound, "MOST_S", 0.1)

    async def drips(server: Server, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(CHUNKED)
        while not writer.is_closing():
            writer.write(b"1\r\na\r\n")
            await asyncio.sleep(0.02)

    async with Server(drips) as server:
        with pytest.raises(requests.ReadTimeout):
            await asyncio.wait_for(get(server.url, timeout_s=0.2), LONG_S)


async def test_who_refuses_is_told_from_what_we_refuse(monkeypatch: pytest.MonkeyPatch) -> None:
    async with Server(OK) as server:
        url = server.url
    with pytest.raises(requests.ConnectionError) as caught:
        await get(url, timeout_s=LONG_S)
    assert nobody_listens(caught.value)
    monkeypatch.setenv("ENGINE_NETWORKS", "10.0.0.0/8")
    with pytest.raises(requests.ConnectionError, match=outbound.REFUSED) as caught:
        await get(url, timeout_s=LONG_S)
    assert not nobody_listens(caught.value)


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
async def test_an_address_outside_is_never_called(host: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ENGINE_NETWORKS", "10.0.0.0/8")
    async with Server(OK) as server:
        with pytest.raises(requests.ConnectionError, match=outbound.REFUSED):
            await get(server.url.replace("127.0.0.1", host), timeout_s=LONG_S)
        assert server.connections == 0


async def test_a_connection_to_a_dashboard_serves_no_look_at_an_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    async with Server(OK, OK) as server:
        monkeypatch.setenv("RAY_ADDRESS", server.url)
        assert (await request("GET", server.url, timeout_s=LONG_S, to_dashboard=True)).text == "hi"
        with pytest.raises(requests.ConnectionError, match=outbound.REFUSED):
            await get(server.url, timeout_s=LONG_S)
        assert len(server.requests) == 1


async def test_a_name_is_looked_up_once_for_each_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    """So an answer that changes between check and connect is not used."""
    asked = []

    async with Server(OK) as server:
        port = int(server.url.rpartition(":")[2])

        async def resolve(host: str, port: int, to_dashboard: bool = False) -> list[tuple[int, str]]:
            asked.append(host)
            return [(socket.AF_INET, "127.0.0.1")]

        monkeypatch.setattr(outbound, "resolve", resolve)
        assert (await get(f"http://engine.example:{port}", timeout_s=LONG_S)).text == "hi"
    assert asked == ["engine.example"]


async def test_a_slow_name_server_does_not_make_an_engine_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    """The time is for connecting and for the answer. And a call ends no earlier than its look-up, which has a
    thread."""
    over = []

    async def resolve(host: str, port: int, to_dashboard: bool = False) -> list[tuple[int, str]]:
        await asyncio.sleep(0.3)
        over.append(host)
        return [(socket.AF_INET, "127.0.0.1")]

    monkeypatch.setattr(outbound, "resolve", resolve)
    async with Server(OK) as server:
        port = int(server.url.rpartition(":")[2])
        assert (await get(f"http://engine.example:{port}", timeout_s=0.2)).text == "hi"
    assert over == ["engine.example"]


@pytest.mark.parametrize(
    "url", ["", "127.0.0.1:80", "ftp://127.0.0.1/", "http://", "http://[::1", f"http://{'a' * 70}.x"]
)
async def test_what_is_no_url_is_an_error_of_requests(url: str) -> None:
    with pytest.raises(requests.RequestException):
        await get(url, timeout_s=LONG_S)


async def test_a_path_is_sent_as_it_may_be() -> None:
    async with Server(OK) as server:
        await get(f"{server.url}/a b\r\nX: y/health", timeout_s=LONG_S)
        assert server.requests[0].startswith(b"GET /a%20b")
        assert b"\r\nX: y" not in server.requests[0]


async def test_connections_are_made_anew_after_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """A name may lead elsewhere by then, and ENGINE_NETWORKS may have changed."""
    monkeypatch.setattr(kept_calls, "RENEW_S", 0.0)
    async with Server(OK, OK) as server:
        await get(server.url, timeout_s=LONG_S)
        await asyncio.sleep(0.01)
        await get(server.url, timeout_s=LONG_S)
        assert server.connections == 2


async def test_servers_that_are_called_no_more_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept_calls, "RENEW_S", 0.0)
    monkeypatch.setattr(wire, "KEEP_S", 0.05)
    async with Server(OK) as earlier, Server(OK) as later:
        await get(earlier.url, timeout_s=LONG_S)
        unused = kept_calls._of_loop()._servers[earlier.url, False]
        await asyncio.sleep(0.01)
        await get(later.url, timeout_s=LONG_S)
        assert list(kept_calls._of_loop()._servers) == [(later.url, False)]
        await until_on_loop(lambda: not unused._wire.keeps)


async def test_kept_connections_leave_files_for_everything_else(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each is an open file, of which a process may have 1,024 as a rule."""
    monkeypatch.setattr(kept_calls, "resource", SimpleNamespace(getrlimit=lambda which: (4, 4), RLIMIT_NOFILE=0))
    servers = [Server(OK, OK) for _ in range(4)]
    for server in servers:
        await server.__aenter__()
    for _ in range(2):
        for server in servers:
            await get(server.url, timeout_s=LONG_S)
    assert [server.connections for server in servers] == [1, 1, 2, 2]
    for server in servers:
        await server.__aexit__()


async def test_many_that_hang_cost_one_that_answers_nothing() -> None:
    async with Server(*[hangs] * 50) as hanging, Server(OK) as server:
        waiting = [asyncio.ensure_future(get(hanging.url, timeout_s=LONG_S)) for _ in range(50)]
        began = time.monotonic()
        assert (await get(server.url, timeout_s=LONG_S)).text == "hi"
        assert time.monotonic() - began < LONG_S
        for each in waiting:
            each.cancel()
