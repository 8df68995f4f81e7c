"""Whatever moves bytes between engines or stops one is for those who know the fleet's token; the rest is named here."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from typing import Any

import aiohttp
import pytest

from tests.workers.engine.client import post
from tests.workers.engine.process import FLEET, EngineProcess
from workers.engine.config import parse
from workers.engine.server import build
from workers.http.fleet_proof import CHALLENGE, CHALLENGE_PATH, PROOF, TO

GUARDED = {
    *(("POST", path) for path in ("/sleep", "/wake_up", "/pause", "/resume", "/abort_requests", "/role")),
    *(
        ("POST", path)
        for path in (
            "/bounds",
            "/links",
            "/kv/release",
            "/kv/renew",
            "/weights/load",
            "/weights/send",
            "/reset_prefix_cache",
        )
    ),
}
OPEN = {
    *(("POST", path) for path in ("/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize", "/ping")),
    *(("GET", path) for path in ("/health", "/livez", "/ping", "/version", "/server_info", "/load", "/metrics")),
    ("GET", "/v1/models"),
    *(("GET", path) for path in ("/is_sleeping", "/is_paused", "/links", "/weights", CHALLENGE_PATH)),
}
# Those that make it go on come last, so that it serves again.
ROUTES = sorted(GUARDED, key=lambda route: (route[1] in ("/wake_up", "/resume"), route[1]))
KV = ("--kv-layers", "1", "--kv-token-bytes", "64")


@pytest.fixture(scope="module", params=[FLEET["token"], ""], ids=["of a fleet", "without a token"])
def token(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def engine(token: str) -> Iterator[EngineProcess]:
    with EngineProcess("--profile", "constant:2ms", "--model", "tiny", *KV, token=token) as process:
        yield process


@pytest.fixture
async def http(engine: EngineProcess) -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession(engine.url) as session:
        yield session


async def test_every_route_is_either_guarded_or_open(fleet_token: str) -> None:
    """A new one belongs into one of the two lists above."""
    app, engine, _ = build(parse(["--port", "1", "--profile", "constant:2ms"]), asyncio.get_running_loop())
    there = {(method, path) for path, methods in app.routes.items() for method in methods}
    engine.close()
    assert there == GUARDED | OPEN
    assert not GUARDED & OPEN


@pytest.mark.parametrize(("method", "path"), ROUTES)
async def test_who_does_not_know_the_token_is_refused(http, method, path):
    for guess in ("", "guess", FLEET["token"][:-1], "\xfc"):
        status, said = await post(http, path, {"token": guess})
        assert (status, said["error"]["param"]) == (403, PROOF)
    async with http.request(method, path, json={"token": FLEET["token"]}) as response:  # as earlier versions sent it
        assert response.status == 403
    async with http.request(method, path) as response:  # no body at all
        assert response.status == 403


@pytest.mark.parametrize(("method", "path"), ROUTES)
async def test_who_knows_it_gets_further_but_not_at_an_engine_without_one(http, token, method, path):
    status, said = await post(http, path, FLEET)
    assert (status == 403) == (not token)
    if not token:
        assert "FLEET_TOKEN" in said["error"]["message"]


@pytest.mark.parametrize(("method", "path"), sorted(OPEN))
async def test_the_open_ones_ask_for_none(http, method, path):
    async with http.request(method, path, json=None if method == "GET" else {"prompt": "x", "max_tokens": 1}) as said:
        assert said.status in (200, 400)


async def stop_after(engine: EngineProcess, path: str, size: int, *fields: str) -> tuple[Any, bytes]:
    """A call whose body stays incomplete. Returns its connection and what it was answered within half a second."""
    host, _, port = engine.url.rpartition("//")[2].partition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Length: {size + 1}\r\n"
    writer.write(head.encode() + b"".join(f"{field}\r\n".encode() for field in fields) + b"\r\n")
    try:
        writer.write(b" " * size)
        async with asyncio.timeout(0.5):
            return writer, await reader.read(300)
    except (TimeoutError, ConnectionError):
        return writer, b""


async def test_no_body_is_read_of_a_call_without_a_proof(engine):
    for path in ("/weights/load", "/role"):
        writer, said = await stop_after(engine, path, 1000)
        assert said.startswith(b"HTTP/1.1 403")
        writer.close()


async def test_calls_with_a_wrong_proof_hold_little(engine, http, token):
    """Anybody gets a challenge, so a body is read to the end before its proof turns out to be wrong."""
    host = engine.url.rpartition("//")[2]
    open_ones = []
    for _ in range(20):
        async with http.get(CHALLENGE_PATH) as response:
            challenge = (await response.json())["challenge"]
        fields = (f"{PROOF}: {'0' * 64}", f"{CHALLENGE}: {challenge}", f"{TO}: {host}")
        open_ones.append(await stop_after(engine, "/weights/load", (1 << 20) - 1, *fields))
        if not token:
            break
    said = [answer.split(b" ")[1] for _, answer in open_ones if answer]
    assert said == ([b"503"] * 4 if token else [b"403"])
    for writer, _ in open_ones:
        writer.close()
    if token:
        await asyncio.sleep(0.1)  # until the engine has seen them close
        assert (await post(http, "/links", {**FLEET, "filler": "x" * 900_000}))[0] != 503
