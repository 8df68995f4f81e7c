"""A fork through gateway processes over PostgreSQL, Redis and reference engine processes."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import requests

from controller.models import Tenant
from controller.services.actors import SYSTEM
from controller.services.slo.tenants import tenant_update
from tests.api.openai.test_process import GatewayProcess, bearer, gateway_over
from tests.waiting import until
from tests.workers.engine.process import FLEET, EngineProcess

pytestmark = [pytest.mark.db, pytest.mark.django_db(transaction=True)]
PROMPT = list(range(1000, 3005))  # 125 blocks of 16 tokens, and five more
PROFILE = "vidur/Llama-2-70B/A100-SXM-80GB/tp2"  # whose prefills take their time


def figure(engine: EngineProcess, name: str) -> float:
    text = requests.get(f"{engine.url}/metrics", timeout=5).text
    return sum(float(line.split()[-1]) for line in text.splitlines() if line.startswith(f"slackline_{name} "))


def test_branches_share_the_kv_of_a_step_and_leave_no_block(tmp_path, redis_server, monkeypatch):
    monkeypatch.setenv("FLEET_TOKEN", FLEET["token"])
    options = ("--model", "demo", "--profile", PROFILE)
    with EngineProcess(*options, token=FLEET["token"]) as first, EngineProcess(*options, token=FLEET["token"]) as other:
        engines = [first, other]
        gateway = gateway_over(tmp_path, engines)
        tenant = Tenant.objects.get(name="acme")
        tenant_update(actor=SYSTEM, tenant_id=tenant.pk, version=tenant.version, changes={"retention_s": 600})
        try:
            fork_and_join(gateway, engines)
            (tmp_path / "second").mkdir()
            second = GatewayProcess(tmp_path / "second", gateway.key, gateway.secret)
            try:
                fork_twice((gateway, second), engines)
            finally:
                second.stop()
        finally:
            gateway.stop()


def fork_and_join(gateway: GatewayProcess, engines: list[EngineProcess]) -> None:
    body = {"prompt": PROMPT, "max_tokens": 2, "checkpoint": 60}
    metadata = {"workflow_id": "w1", "step_key": "plan"}
    until(lambda: gateway.ask(**body, metadata=metadata).status_code == 200, 20)
    assert sum(figure(engine, "kv_checkpoints") for engine in engines) == 1
    (where,) = (engine for engine in engines if figure(engine, "kv_checkpoints"))

    forked = until(lambda: _forked(call(gateway, "POST", "/fork", json={"step": "plan", "branches": 8})), 10)
    assert forked["checkpoint"] == "held"
    with ThreadPoolExecutor(8) as pool:
        asked = [
            pool.submit(gateway.ask, prompt=[*PROMPT, number], max_tokens=3, branch=name)
            for number, name in enumerate(forked["branches"])
        ]
        answers = [each.result().json() for each in asked]
    cached = [answer["usage"]["prompt_tokens_details"]["cached_tokens"] for answer in answers]
    assert cached == [len(PROMPT)] * 8, "each computed the one token that is its own"
    assert figure(where, "kv_branches") == 8
    for name in forked["branches"]:
        assert figure(where, "kv_checkpoint_blocks") > 0
        assert call(gateway, "DELETE", f"/branches/{name}").status_code == 200
    until(lambda: figure(where, "kv_checkpoint_blocks") == 0, 10)
    assert kv_usage(where) == 0, "leaked_blocks"


def fork_twice(gateways: tuple[GatewayProcess, GatewayProcess], engines: list[EngineProcess]) -> None:
    """One fork at each gateway; the client of the second asks again at the first, as after a crash."""
    one, two = gateways
    body = {"prompt": PROMPT, "max_tokens": 2, "checkpoint": 60}
    metadata = {"workflow_id": "w1", "step_key": "plan-2"}
    until(lambda: one.ask(**body, metadata=metadata).status_code == 200, 20)
    (where,) = (engine for engine in engines if figure(engine, "kv_checkpoints"))
    asked = {"step": "plan-2", "branches": 2}
    first = until(lambda: _forked(call(one, "POST", "/fork", json=asked)), 10)
    second = until(lambda: _forked(call(two, "POST", "/fork", json=asked | {"fork_id": "b"})), 20)
    for name in (*first["branches"], second["branches"][0]):
        assert call(two, "DELETE", f"/branches/{name}").status_code == 200
    again = call(one, "POST", "/fork", json=asked | {"fork_id": "b"})
    assert (again.status_code, again.json()["checkpoint"]) == (200, "held")
    assert again.json()["open"] == second["branches"][1:]
    (name,) = again.json()["open"]
    answer = one.ask(prompt=[*PROMPT, 1], max_tokens=3, branch=name).json()
    assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == len(PROMPT)
    assert figure(where, "kv_checkpoint_blocks") > 0
    assert call(one, "DELETE", f"/branches/{name}").status_code == 200
    until(lambda: figure(where, "kv_checkpoint_blocks") == 0, 10)
    assert kv_usage(where) == 0, "leaked_blocks"


def call(gateway: GatewayProcess, method: str, path: str, **more: object) -> requests.Response:
    url = f"{gateway.url}/v1/workflows/w1{path}"
    return requests.request(method, url, headers=bearer(gateway.secret), timeout=10, **more)  # type: ignore[arg-type]


def kv_usage(engine: EngineProcess) -> float:
    text = requests.get(f"{engine.url}/metrics", timeout=5).text
    usage = next(line for line in text.splitlines() if line.startswith("vllm:kv_cache_usage_perc"))
    return float(usage.split()[-1])


def _forked(answer: requests.Response) -> dict | None:
    return answer.json() if answer.status_code == 201 else None
