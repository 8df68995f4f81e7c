"""A real vLLM with `--api-key`: the gateway's adapter and the prober send it, and nobody else gets an answer."""

from __future__ import annotations

from pathlib import Path

import pytest
import requests

from benchmarks.servers.engines import MODEL_NAME, vllm_missing, vllm_servers
from controller.core.types import InstanceSpec
from workers.backends.base import Backend, EngineError, UpstreamCall
from workers.backends.registry import ask
from workers.http.engine_keys import EngineKey
from workers.provisioners.static import Endpoint, StaticProvisioner

pytestmark = pytest.mark.vllm
KEY = "sk-for-this-test"


async def completion(backend: Backend) -> list[str]:
    head = f'{{"model":"{MODEL_NAME}","prompt":"hello","max_tokens":2'.encode()
    call = UpstreamCall("r", "/v1/completions", head, 0, streamed=False, keep_usage=False)
    return [chunk.kind async for chunk in backend.generate(call)]


@pytest.mark.thorough
def test_a_server_with_a_key_serves_through_slackline_alone(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if (missing := vllm_missing()) is not None:
        pytest.fail(missing, pytrace=False)
    keys = folder / "keys"
    keys.mkdir()
    monkeypatch.setenv("ENGINE_KEYS_DIR", str(keys))
    with vllm_servers(1, folder / "key-logs", arguments=("--api-key", KEY)) as (server,):
        (keys / "v").write_text(f"{server.url} {KEY}")
        body = {"model": MODEL_NAME, "prompt": "hello", "max_tokens": 2}
        assert requests.post(f"{server.url}/v1/completions", json=body, timeout=60).status_code == 401
        plain = InstanceSpec("v", MODEL_NAME, url=server.url, backend="vllm")
        with pytest.raises(EngineError) as raised:
            ask(plain, completion)
        assert raised.value.status == 401
        keyed = InstanceSpec("v", MODEL_NAME, url=server.url, backend="vllm", key="v")
        assert ask(keyed, completion) == ["accepted", "body"]
        (seen,) = StaticProvisioner({"v": Endpoint(server.url, "vllm", key=EngineKey("v", "v", server.url))}).observe()
        assert seen.state == "ready"
