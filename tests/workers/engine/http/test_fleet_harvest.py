"""Whoever registers an instance hears what the fleet says to it. He records everything, passes it on to an engine, and
gets nothing: neither the fleet's token nor anything that another engine accepts."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import aiohttp
import orjson
import pytest
import requests

from benchmarks.attacks.harvest import Answer, Relay, listener
from controller.core.types import InstanceSpec
from tests.workers.engine.client import COMPLETIONS, metric, post
from tests.workers.engine.process import FLEET, EngineProcess
from workers.actions.fleet_calls import call_fleet
from workers.actions.instance_links import LinksClient
from workers.actions.sleep_client import ReferenceSleepClient
from workers.actions.weights_client import EngineAway, EngineRefuses, WeightsClient
from workers.backends.base import EngineError, Limits, RoleRefused
from workers.backends.reference import ReferenceBackend
from workers.engine.kv.transfer import KvConnection
from workers.engine.kv.wire import KvTransferError, read_frame, write_frame
from workers.http.fleet_proof import CHALLENGE, CHALLENGE_PATH, PROOF, TO

TOKEN = FLEET["token"]
KV = ("--kv-layers", "1", "--kv-token-bytes", "64")


@pytest.fixture(scope="module")
def victim() -> Iterator[EngineProcess]:
    with EngineProcess("--profile", "constant:2ms", "--model", "tiny", *KV, token=TOKEN) as engine:
        yield engine


def by_backend(act: Callable[[ReferenceBackend], Any]) -> Callable[[str], None]:
    def run(url: str) -> None:
        async def call() -> None:
            async with aiohttp.ClientSession() as session:
                await act(ReferenceBackend(InstanceSpec("evil", "tiny", url=url), session, Limits(telemetry_s=30.0)))

        asyncio.run(call())

    return run


CALLS: dict[str, Callable[[str], object]] = {
    "sleep": lambda url: ReferenceSleepClient(url, TOKEN).sleep(2),
    "wake": lambda url: ReferenceSleepClient(url, TOKEN).wake(),
    "prefix cache": lambda url: ReferenceSleepClient(url, TOKEN).reset_prefix_cache(),
    "weights": lambda url: WeightsClient(url, TOKEN).order_load("o", [{"kind": "disk"}]),
    "links": lambda url: LinksClient(url, TOKEN).announce("evil", []),
    "release": by_backend(lambda backend: backend.free_kv(["r"])),
    "role": by_backend(lambda backend: backend.set_role(backend.spec.role)),
}
REFUSED = (EngineAway, EngineRefuses, EngineError, RoleRefused)


@pytest.mark.parametrize("name", CALLS)
def test_what_a_registered_listener_hears_is_of_no_use_at_another_engine(
    victim: EngineProcess, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FLEET_TOKEN", TOKEN)
    relay = Relay(victim.url)
    with listener(relay) as url, pytest.raises(REFUSED):
        CALLS[name](url)
    assert not any(TOKEN.encode() in heard for heard in relay.heard)
    ((status, said),) = relay.answers
    assert (status, orjson.loads(said)["error"]["param"]) == (403, TO)
    CALLS[name](victim.url)  # the same call, to the engine that it is for


def test_a_proof_is_good_for_one_call_of_one_kind(victim: EngineProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever reads the network sees a call that was made. He makes it again, or another one with its proof."""
    seen: dict[str, str] = {}
    real = requests.Session.request

    def recorded(self: Any, method: str, url: str, **named: Any) -> requests.Response:
        seen.update(named.get("headers") or {})
        return real(self, method, url, **named)

    with monkeypatch.context() as patch:
        patch.setattr(requests.Session, "request", recorded)
        for path in ("/pause", "/resume"):
            assert call_fleet("POST", victim.url, path, TOKEN, body={}, timeout=10).status_code == 200
    told = {name: seen[name] for name in (PROOF, CHALLENGE, TO)}
    again = requests.post(victim.url + "/resume", data=b"{}", headers=told, timeout=10)
    assert (again.status_code, again.json()["error"]["param"]) == (403, CHALLENGE)
    fresh = requests.get(victim.url + CHALLENGE_PATH, timeout=10).json()["challenge"]
    for path, body in (("/resume", b"{}"), ("/sleep?level=2", b"{}"), ("/resume", b'{"x":1}')):
        answer = requests.post(victim.url + path, data=body, headers={**told, CHALLENGE: fresh}, timeout=10)
        assert (answer.status_code, answer.json()["error"]["param"]) == (403, PROOF)
    assert requests.get(victim.url + "/is_sleeping", timeout=10).json() == {"is_sleeping": False}


def test_an_engine_of_an_earlier_version_gets_no_token(monkeypatch: pytest.MonkeyPatch) -> None:
    """It has no challenges. There is no way back to sending the token."""
    monkeypatch.setenv("FLEET_TOKEN", TOKEN)
    heard: list[str] = []

    def old(method: str, path: str, headers: dict[str, str], body: bytes) -> Answer:
        heard.append(path)
        return 404, b"{}"

    with listener(old) as url:
        for name in ("sleep", "weights", "links", "release"):
            with pytest.raises(REFUSED):
                CALLS[name](url)
    assert heard == [CHALLENGE_PATH] * 4


# ---- KV -------------------------------------------------------------------------------------------------------------


@pytest.fixture
async def http(victim: EngineProcess) -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession(victim.url) as session:
        yield session


async def test_kv_is_pulled_from_no_address_that_somebody_typed(http: aiohttp.ClientSession) -> None:
    """The request names a listener. The engine does not even connect."""
    came: list[object] = []

    async def listen(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        came.append(await reader.read(100))
        writer.close()

    server = await asyncio.start_server(listen, "127.0.0.1", 0)
    offer = {"do_remote_prefill": True, "remote_host": "127.0.0.1", "remote_port": server.sockets[0].getsockname()[1]}
    offer |= {"remote_request_id": "r", "remote_num_tokens": 20, "remote_engine_id": "p"}
    for proof in ({}, {"remote_proof": "0" * 64}):
        body = {"prompt": list(range(20)), "max_tokens": 3, "kv_transfer_params": {**offer, **proof}}
        status, said = await post(http, COMPLETIONS, body)
        assert (status, said["error"]["kv"]["reason"]) == (502, "refused"), said
    server.close()
    assert came == []
    assert await metric(http, "num_requests_running") == 0


@pytest.mark.parametrize("rewritten", [False, True], ids=["as it came", "with the victim's address"])
async def test_a_greeting_that_was_passed_on_opens_no_connection(http: aiohttp.ClientSession, rewritten: bool) -> None:
    """An engine connects to the listener, which passes the greeting on to the victim, to ask for KV afterwards on the
    connection that it would have opened."""
    async with http.get("/links") as answer:
        at = (await answer.json())["at"]
    said: list[dict[str, Any]] = []

    async def relay(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        theirs, to_victim = await asyncio.open_connection(at["host"], at["port"])
        hello = await read_frame(reader)
        write_frame(to_victim, {**hello, "to": f"{at['host']}:{at['port']}"} if rewritten else hello)
        said.append(await read_frame(theirs))
        write_frame(writer, said[0])
        try:
            write_frame(to_victim, await read_frame(reader))
            said.append(await read_frame(theirs))
        except (OSError, asyncio.IncompleteReadError):
            pass
        finally:
            to_victim.close()
            writer.close()

    server = await asyncio.start_server(relay, "127.0.0.1", 0)
    with pytest.raises(KvTransferError) as raised:
        await KvConnection.open("127.0.0.1", server.sockets[0].getsockname()[1], TOKEN, 5.0)
    server.close()
    assert raised.value.reason == "refused"
    assert len(said) == 1  # the engine that connected did not prove anything
    assert "this engine is" in said[0].get("error", "") or rewritten
