"""Keys of engines: who has none gets nothing, and a key goes to the address that it is for and to no other."""

from __future__ import annotations

import threading
from collections.abc import AsyncIterator, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import requests

from controller.core.types import KEY_MADE, InstanceSpec
from tests.workers.engine.client import post, post_once
from tests.workers.engine.process import FLEET, EngineProcess
from workers.actions.instance_links import LinksClient
from workers.actions.sleep_client import ReferenceSleepClient, SleepClient
from workers.actions.weights_client import EngineAway, EngineRefuses, WeightsClient
from workers.backends.base import EngineError, Limits, UpstreamCall
from workers.backends.reference import ReferenceBackend
from workers.http import engine_keys
from workers.http.engine_keys import EngineKey, NoEngineKey
from workers.http.fleet_proof import CHALLENGE_PATH, KEY_VARIABLE, made_key
from workers.provisioners.static import Endpoint, StaticProvisioner

KEY, TOKEN = "sk-of-this-engine", FLEET["token"]
OPTIONS = ("--profile", "constant:2ms", "--model", "tiny", "--kv-layers", "1", "--kv-token-bytes", "64")


@pytest.fixture(autouse=True)
def keys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("ENGINE_KEYS_DIR", str(tmp_path))
    monkeypatch.setattr(engine_keys, "CHECKED_S", 0.0)
    return tmp_path


@pytest.fixture(scope="module")
def engine() -> Iterator[EngineProcess]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(KEY_VARIABLE, KEY)
        with EngineProcess(*OPTIONS, token=TOKEN) as process:
            yield process


def key_for(engine: EngineProcess, name: str = "e1") -> EngineKey:
    return EngineKey(name, "e1", engine.url)


CALLED = ("/metrics", "/v1/models", "/server_info", "/load", "/version", "/links", "/weights", "/is_sleeping")


def test_who_reaches_an_engine_with_a_key_and_has_none_gets_nothing(engine: EngineProcess) -> None:
    for path in CALLED:
        for told in ({}, {"Authorization": "Bearer guess"}, {"Authorization": f"Basic {KEY}"}, {"Authorization": KEY}):
            answer = requests.get(engine.url + path, headers=told, timeout=10)
            assert (answer.status_code, answer.json()["error"]["param"]) == (401, "authorization"), path
    body = {"prompt": "x", "max_tokens": 1}
    for path in ("/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize"):
        assert requests.post(engine.url + path, json=body, timeout=10).status_code == 401
    assert requests.post(engine.url + "/reset_prefix_cache", timeout=10).status_code == 403
    with_key = {"Authorization": f"Bearer {KEY}"}
    assert requests.post(engine.url + "/reset_prefix_cache", headers=with_key, timeout=10).status_code == 403
    assert requests.post(engine.url + "/v1/completions", json=body, headers=with_key, timeout=10).status_code == 200
    assert requests.get(engine.url + "/metrics", headers=with_key, timeout=10).status_code == 200


def test_probes_and_proved_calls_need_no_key(engine: EngineProcess) -> None:
    for path in ("/livez", "/health", "/ping", CHALLENGE_PATH):
        assert requests.get(engine.url + path, timeout=10).status_code == 200
    assert post_once(engine.url, "/reset_prefix_cache", FLEET).json() == {"success": True}


def test_one_without_a_token_of_the_fleet_resets_nothing_for_strangers() -> None:
    with EngineProcess(*OPTIONS, token="") as plain:
        assert requests.post(plain.url + "/reset_prefix_cache", timeout=10).status_code == 403


# ---- whoever calls it sends the key ---------------------------------------------------------------------------------


@pytest.fixture
async def backend(engine: EngineProcess, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[ReferenceBackend]:
    monkeypatch.setenv("FLEET_TOKEN", TOKEN)
    async with aiohttp.ClientSession(auto_decompress=False) as session:
        spec = InstanceSpec("e1", "tiny", url=engine.url, backend="reference", key="e1")
        yield ReferenceBackend(spec, session, Limits(telemetry_s=30.0))


async def everything(backend: ReferenceBackend) -> None:
    assert await backend.ready()
    await backend.telemetry(0.0)
    await backend.links()
    await backend.role()
    await backend.free_kv(["r"])
    head = b'{"model":"tiny","prompt":"x","max_tokens":2'
    call = UpstreamCall("r", "/v1/completions", head, 0, streamed=False, keep_usage=False)
    assert [chunk.kind async for chunk in backend.generate(call)] == ["accepted", "body"]


async def test_a_gateway_sends_it_with_everything(engine: EngineProcess, keys: Path, backend: ReferenceBackend) -> None:
    (keys / "e1").write_text(f"{engine.url} {KEY}\n")
    await everything(backend)
    (keys / "e1").write_text(f"{engine.url} sk-rotated-and-longer\n")  # read again, without a restart
    with pytest.raises(EngineError) as raised:
        await backend.telemetry(0.0)
    assert raised.value.status == 401
    (keys / "e1").unlink()
    with pytest.raises(EngineError, match="the key e1 cannot be read in ENGINE_KEYS_DIR"):
        await backend.telemetry(0.0)


def test_jobs_send_it_with_everything(engine: EngineProcess, keys: Path) -> None:
    (keys / "e1").write_text(f"{engine.url} {KEY}\n")
    key = key_for(engine)
    assert WeightsClient(engine.url, TOKEN, key).look().state == "present"
    assert LinksClient(engine.url, TOKEN, key).look().host
    assert ReferenceSleepClient(engine.url, TOKEN, key).look().awake
    assert ReferenceSleepClient(engine.url, TOKEN, key).reset_prefix_cache()
    (seen,) = StaticProvisioner({"e1": Endpoint(engine.url, "reference", asleep=1, key=key)}).observe()
    assert (seen.state, seen.awake) == ("ready", 1)
    for client in (WeightsClient(engine.url, TOKEN), LinksClient(engine.url, TOKEN), SleepClient(engine.url)):
        with pytest.raises((EngineAway, EngineRefuses)):
            client.look()


# ---- it goes to one address only ------------------------------------------------------------------------------------


def test_another_address_does_not_get_it(engine: EngineProcess, keys: Path) -> None:
    """Whoever may register an instance names any key and any URL."""
    (keys / "e1").write_text(f"{engine.url} {KEY}\n")
    heard: list[str] = []

    class Listener(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            heard.append(self.path)
            self.send_response(200)
            self.end_headers()

        def log_message(self, *said: Any) -> None:
            return

    server = ThreadingHTTPServer(("127.0.0.1", 0), Listener)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    url = f"http://127.0.0.1:{server.server_port}"
    evil = EngineKey("e1", "evil", url)
    with pytest.raises(NoEngineKey, match=r"the key e1 is for 127\.0\.0\.1:\d+, not for") as raised:
        evil.headers()
    assert KEY not in str(raised.value)
    (seen,) = StaticProvisioner({"evil": Endpoint(url, "vllm", key=evil)}).observe()
    assert (seen.state, "is for" in seen.error) == ("exited", True)
    with pytest.raises(EngineAway):
        SleepClient(url, evil).look()
    server.shutdown()
    server.server_close()
    assert heard == []


@pytest.mark.parametrize("name", ["../e1", "/etc/passwd", ".hidden", "", " ", "a/b", "a" * 65])
def test_a_name_is_no_path(keys: Path, name: str) -> None:
    (keys.parent / "e1").write_text("http://h:1 secret")
    if not name:
        assert EngineKey(name, "e", "http://h:1").headers() == {}
        return
    with pytest.raises(NoEngineKey, match="no name of a key"):
        EngineKey(name, "e", "http://h:1").headers()


@pytest.mark.parametrize(
    "content", [b"", b"secret", b"http://h:1", b"http://h:1 two words", b"ftp://h:1 secret", b"http://h:x secret",
                b"http://h:1 se\xff", b"http://h:1 s\x00", b"http://h:1 " + b"s" * 513]
)  # fmt: skip
def test_a_file_that_is_none_is_said_without_what_is_in_it(keys: Path, content: bytes) -> None:
    (keys / "e1").write_bytes(content)
    with pytest.raises(NoEngineKey, match="the key e1 in ENGINE_KEYS_DIR") as raised:
        EngineKey("e1", "e1", "http://h:1").headers()
    assert "se" not in str(raised.value).replace("space", "")


def test_a_made_key_is_another_one_for_each_instance_and_nothing_without_a_token() -> None:
    made = {made_key(TOKEN, "a"), made_key(TOKEN, "b"), made_key("another", "a")}
    assert len(made) == 3
    assert EngineKey(KEY_MADE, "a", "http://h:1", TOKEN).headers() == {
        "Authorization": f"Bearer {made_key(TOKEN, 'a')}"
    }
    assert EngineKey(KEY_MADE, "a", "http://h:1", "").headers() == {}
    assert TOKEN not in repr(EngineKey(KEY_MADE, "a", "http://h:1", TOKEN))


async def test_an_engine_with_weights_is_read_by_others_of_the_fleet_without_its_key(engine: EngineProcess) -> None:
    with EngineProcess(*OPTIONS, "--weights", "absent", token=TOKEN) as warm:
        async with aiohttp.ClientSession(warm.url) as http:
            body = {**FLEET, "sources": [{"kind": "engine", "url": engine.url}]}
            status, said = await post(http, "/weights/load", body)
            assert (status, said["loaded"]) == (200, True), said
