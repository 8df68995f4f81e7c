"""Tenants are apart in the prefix caches of engines, whatever salt a client names."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import requests

from api.openai.state.snapshot import SnapshotFile
from benchmarks.attacks.harvest import listener
from controller.core.snapshot import TenantConfig
from controller.core.types import InstanceSpec
from tests.api.openai.gateways import KEY, TestBed, completion, key_config, snapshot
from tests.workers.http.test_servers import started
from workers.backends.base import Limits, UpstreamCall
from workers.backends.fake import Script
from workers.backends.sglang import SglangBackend
from workers.backends.vllm import VllmBackend
from workers.supervisor.ports import free_port

SECOND = "sk-second"


async def salts() -> tuple[list[bytes], list[bytes]]:
    """Of two requests of one tenant, and of one of another; what the engines got of their bodies."""
    tenants = (TenantConfig(1, "acme", "chat"), TenantConfig(2, "other", "chat"))
    keys = (key_config(), replace(key_config(SECOND), id=2, tenant="other"))
    async with TestBed(snapshot(("e1",), tenants=tenants, keys=keys)) as bed:
        bed.every(Script())
        bed.gateway.options = replace(bed.gateway.options, salt_key=b"k" * 40)
        await bed.ask(completion(cache_salt="mine", extra_key="mine"))
        await bed.ask(completion())
        await bed.ask(completion(cache_salt="mine"), key=SECOND)
        calls = bed.backend("e1").calls
        return [call.salt for call in calls], [call.head for call in calls]


async def test_each_tenant_has_a_salt_of_its_own_and_no_client_names_one():
    (first, second, other), heads = await salts()
    assert first == second != other
    assert len(first) == len(other) == 32
    assert not any(b"mine" in head for head in heads)


def test_a_gateway_as_it_is_started_makes_them_of_its_secret(tmp_path: Path) -> None:
    heard: list[dict[str, Any]] = []

    def vllm(method: str, path: str, headers: dict[str, str], body: bytes) -> tuple[int, bytes]:
        if path == "/v1/completions":
            heard.append(json.loads(body))
            return 200, b'{"choices":[{"text":"a"}],"usage":{"prompt_tokens":1,"completion_tokens":1}}'
        return 200, b"vllm:num_requests_running 0\n" if path == "/metrics" else b""

    tenants = (TenantConfig(1, "acme", "chat"), TenantConfig(2, "other", "chat"))
    keys = (key_config(), replace(key_config(SECOND), id=2, tenant="other"))
    with listener(vllm) as url:
        instance = InstanceSpec("e1", "demo", backend="vllm", url=url)
        kept, port = tmp_path / "configuration.json", free_port()
        made = replace(snapshot(tenants=tenants, keys=keys), instances=(instance,))
        SnapshotFile(kept).save(made, time.time())
        with started(tmp_path, port, "api.openai", "--port", str(port), "--snapshot", str(kept)):
            for key in (KEY, SECOND):
                asked: dict[str, Any] = {
                    "json": completion(),
                    "headers": {"Authorization": f"Bearer {key}"},
                    "timeout": 30,
                }
                assert requests.post(f"http://127.0.0.1:{port}/v1/completions", **asked).status_code == 200
    first, second = (body["cache_salt"] for body in heard)
    assert len(first) == len(second) == 32
    assert first != second


def test_engines_get_it_after_all_that_a_client_sent():
    session: Any = None
    call = UpstreamCall("r", "/v1/completions", b'{"prompt":"x"', 0, False, False, salt=b"s" * 32)
    vllm = VllmBackend(InstanceSpec("a", "demo", url="http://127.0.0.1:1"), session, Limits()).body_of(call)
    sglang = SglangBackend(InstanceSpec("a", "demo", url="http://127.0.0.1:1"), session, Limits()).body_of(call)
    assert json.loads(vllm)["cache_salt"] == json.loads(sglang)["extra_key"] == "s" * 32
    assert vllm.index(b"cache_salt") > vllm.index(b"prompt")
