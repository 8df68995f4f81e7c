"""Stored responses through two gateway processes over PostgreSQL, Redis and reference engine processes."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import requests

from controller.models import RequestRecord, Tenant
from controller.services.actors import SYSTEM
from controller.services.slo.tenants import tenant_update
from tests.api.openai.test_process import GatewayProcess, bearer, gateway_over
from tests.waiting import until
from tests.workers.engine.process import EngineProcess
from workers.stored_responses import LEASE_S

pytestmark = [pytest.mark.db, pytest.mark.django_db(transaction=True)]
Pair = tuple[GatewayProcess, GatewayProcess]


@pytest.fixture
def pair(tmp_path: Path, redis_server: object) -> Iterator[Pair]:
    folders = [tmp_path / name for name in ("one", "two")]
    for folder in folders:
        folder.mkdir()
    options = ("--model", "demo", "--profile", "constant:10ms")
    with EngineProcess(*options) as first, EngineProcess(*options) as second:
        one = gateway_over(folders[0], [first, second])
        two = GatewayProcess(folders[1], one.key, one.secret)
        tenant = Tenant.objects.get(name="acme")
        tenant_update(actor=SYSTEM, tenant_id=tenant.pk, version=tenant.version, changes={"retention_s": 600})
        try:
            until(lambda: all(create(gateway, "x").json().get("store") for gateway in (one, two)), 20)
            yield one, two
        finally:
            for gateway in (one, two):
                gateway.stop()


def create(gateway: GatewayProcess, said: str, **fields: Any) -> requests.Response:
    body = {"model": "demo", "input": said, "max_output_tokens": 4, "ignore_eos": True, **fields}
    return requests.post(f"{gateway.url}/v1/responses", json=body, headers=bearer(gateway.secret), timeout=30)


def read(gateway: GatewayProcess, response: str, below: str = "", method: str = "GET") -> requests.Response:
    url = f"{gateway.url}/v1/responses/{response}{below}"
    return requests.request(method, url, headers=bearer(gateway.secret), timeout=10)


def test_a_conversation_goes_from_one_gateway_to_the_other_and_back(pair: Pair) -> None:
    one, two = pair
    first = create(one, "one").json()
    assert read(two, first["id"]).json() == first
    second = create(two, "two", previous_response_id=first["id"]).json()
    assert second["usage"]["input_tokens"] > first["usage"]["input_tokens"]
    page = requests.get(
        f"{one.url}/v1/responses/{second['id']}/input_items?order=asc&limit=1", headers=bearer(one.secret), timeout=10
    ).json()
    assert (page["data"][0]["content"][0]["text"], page["has_more"]) == ("one", True)
    assert read(one, first["id"], method="DELETE").json()["deleted"]
    assert read(two, first["id"]).status_code == 404
    assert read(two, second["id"]).json() == second


def test_a_response_in_the_background_is_cancelled_at_the_other_gateway(pair: Pair) -> None:
    one, two = pair
    made = create(one, "much", background=True, max_output_tokens=3000).json()
    assert made["status"] == "in_progress"
    assert read(two, made["id"], "/cancel", "POST").json()["status"] == "cancelled"
    request = made["id"].replace("resp_", "req-")
    record = until(lambda: RequestRecord.objects.filter(pk=request).first(), 10)
    assert record.outcome == "cancelled"
    assert read(one, made["id"]).json()["status"] == "cancelled"


@pytest.mark.slow
def test_what_a_killed_gateway_leaves_has_failed_after_its_lease(pair: Pair) -> None:
    one, two = pair
    made = create(one, "much", background=True, max_output_tokens=3000).json()
    assert read(two, made["id"]).json()["status"] == "in_progress"
    one.process.kill()
    killed_at = time.monotonic()
    found = until(lambda: _ended(read(two, made["id"])), 2 * LEASE_S)
    assert time.monotonic() - killed_at > LEASE_S / 2
    assert (found["status"], found["error"]["code"]) == ("failed", "server_error")


def _ended(answer: requests.Response) -> dict[str, Any] | None:
    found: dict[str, Any] = answer.json()
    return None if found["status"] == "in_progress" else found
