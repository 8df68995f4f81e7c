"""Stored responses through two gateway processes over PostgreSQL, Redis and reference engine processes."""

from __future__ import annotations

import json
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


def stream(gateway: GatewayProcess, response: str = "", after: int | None = None, **fields: Any) -> Iterator[Any]:
    """The events of a new background response, or of one after an event, as they come."""
    query: dict[str, Any] = {"stream": "true"} if after is None else {"stream": "true", "starting_after": after}
    body = {"model": "demo", "input": "much", "ignore_eos": True, "background": True, "stream": True, **fields}
    asked = {"params": query} if response else {"json": body}
    method, url = "GET" if response else "POST", f"{gateway.url}/v1/responses/{response}".rstrip("/")
    with requests.request(method, url, headers=bearer(gateway.secret), timeout=30, stream=True, **asked) as answer:
        assert answer.status_code == 200, answer.text
        for line in answer.iter_lines(chunk_size=1):
            if line.startswith(b"data: "):
                yield json.loads(line[6:])


def test_a_stream_that_broke_goes_on_at_the_other_gateway(pair: Pair) -> None:
    one, two = pair
    begun = stream(one, max_output_tokens=200)
    before = [next(begun) for _ in range(20)]
    begun.close()  # the connection breaks
    response = before[0]["response"]["id"]
    after = list(stream(two, response, before[-1]["sequence_number"]))
    events = before + after
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    last = events[-1]
    assert (last["type"], last["response"]["usage"]["output_tokens"]) == ("response.incomplete", 200)
    said = "".join(event["delta"] for event in events if event["type"] == "response.output_text.delta")
    assert said == last["response"]["output"][0]["content"][0]["text"]
    assert list(stream(one, response)) == list(stream(two, response)) == events


@pytest.mark.slow
def test_readers_of_a_killed_gateway_go_on_elsewhere_and_hear_that_it_failed(pair: Pair) -> None:
    one, two = pair
    begun = stream(one, max_output_tokens=3000)
    before = [next(begun) for _ in range(60)]
    response = before[0]["response"]["id"]
    other = stream(two, response)
    assert [next(other) for _ in range(20)] == before[:20]
    one.process.kill()
    killed_at = time.monotonic()
    with pytest.raises(requests.RequestException):
        before.extend(begun)
    assert len(before) < 1000
    *_, failed, error = list(other)
    assert LEASE_S / 2 < time.monotonic() - killed_at < 2 * LEASE_S
    assert (failed["type"], error["type"], error["code"]) == ("response.failed", "error", "server_error")
    assert failed["response"] == read(two, response).json()
    number = before[-1]["sequence_number"]
    *_, told, _ = stream(two, response, number)
    assert (told["type"], told["response"]) == ("response.failed", failed["response"])
    assert told["sequence_number"] > number
