"""/livez, /healthz and /metrics of a gateway: what strangers, neighbours and holders of the token get."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from api.openai.app import OpenAIApp
from api.openai.gateway import Gateway
from api.openai.status_pages import StatusPages
from tests.api.openai.gateways import Answer, TestBed, completion

TOKEN = "a-token-for-metrics"
NEAR, FAR = "127.0.0.1", "10.0.0.9"


async def ask(bed: TestBed, path: str, *, peer: str | None = NEAR, **headers: str) -> Answer:
    sent: Answer = Answer()
    scope = {
        "type": "http", "path": path, "method": "GET", "client": (peer, 5) if peer else None,
        "headers": [(name.replace("_", "-").encode(), value.encode()) for name, value in headers.items()],
    }  # fmt: skip

    async def send(message: Any) -> None:
        if message["type"] == "http.response.start":
            sent.status = message["status"]
        else:
            sent.body += message.get("body", b"")

    await bed.app(scope, None, send)  # type: ignore[arg-type]
    return sent


@pytest.mark.parametrize("peer", [FAR, None, "::2", "nonsense"])
async def test_strangers_get_the_status_alone_and_no_figures(peer: str | None) -> None:
    async with TestBed() as bed:
        await bed.ask(completion())
        assert json.loads((await ask(bed, "/healthz", peer=peer)).body) == {"status": "ok"}
        refused = await ask(bed, "/metrics", peer=peer)
        assert refused.status == 401
        assert b"acme" not in refused.body


@pytest.mark.parametrize("peer", [NEAR, "127.9.9.9", "::1", "::ffff:127.0.0.1"])
async def test_without_a_token_the_same_machine_sees_all(peer: str) -> None:
    async with TestBed() as bed:
        assert "instances" in json.loads((await ask(bed, "/healthz", peer=peer)).body)
        assert (await ask(bed, "/metrics", peer=peer)).status == 200


@pytest.mark.parametrize("name", ["x_forwarded_for", "forwarded", "via", "x_real_ip"])
async def test_a_proxy_of_the_same_machine_does_not_open_it(name: str) -> None:
    async with TestBed() as bed:
        assert (await ask(bed, "/metrics", **{name: FAR})).status == 401


@pytest.mark.parametrize("host", ["localhost:8080", "127.0.0.1:8080", "[::1]:8080", "10.0.0.9"])
async def test_the_same_machine_calls_by_address(host: str) -> None:
    async with TestBed() as bed:
        assert (await ask(bed, "/metrics", host=host)).status == 200


@pytest.mark.parametrize("host", ["evil.example", "evil.example:8080", "127.0.0.1.evil.example", "[evil]:1"])
async def test_a_page_whose_name_was_made_to_resolve_to_this_machine_reads_nothing(host: str) -> None:
    async with TestBed() as bed:
        assert (await ask(bed, "/metrics", host=host)).status == 401
        assert json.loads((await ask(bed, "/healthz", host=host)).body) == {"status": "ok"}


async def test_with_a_token_everybody_needs_it() -> None:
    async with TestBed() as bed:
        bed.gateway.options = replace(bed.gateway.options, metrics_token=TOKEN)
        for peer in (NEAR, FAR):
            for wrong in ("", f"Bearer {TOKEN}x", f"Basic {TOKEN}", "Bearer"):
                assert (await ask(bed, "/metrics", peer=peer, authorization=wrong)).status == 401
                health = await ask(bed, "/healthz", peer=peer, authorization=wrong)
                assert json.loads(health.body) == {"status": "ok"}
            right = f"Bearer {TOKEN}"
            assert (await ask(bed, "/metrics", peer=peer, authorization=right)).status == 200
            assert b"instances" in (await ask(bed, "/healthz", peer=peer, authorization=right)).body


async def test_a_stopping_gateway_is_not_ready_to_strangers_either() -> None:
    async with TestBed() as bed:
        bed.gateway.closing = True
        answer = await ask(bed, "/healthz", peer=FAR)
        assert (answer.status, json.loads(answer.body)) == (503, {"status": "unavailable"})


async def test_liveness_needs_no_gateway_and_tells_nothing() -> None:
    async def start() -> Gateway:
        raise AssertionError

    async def stop() -> None:
        raise AssertionError

    bed = TestBed()
    bed.app = OpenAIApp(start, stop)
    answer = await ask(bed, "/livez", peer=None)
    assert (answer.status, answer.body) == (200, b"ok\n")


async def test_an_answer_is_kept_for_a_second(monkeypatch: pytest.MonkeyPatch) -> None:
    made, now = [], [100.0]
    monkeypatch.setattr("api.openai.status_pages.metrics", lambda gateway: made.append(1) or b"page")
    async with TestBed() as bed:
        bed.app._status = StatusPages(clock=lambda: now[0])
        for _ in range(50):
            assert (await ask(bed, "/metrics")).body == b"page"
        assert len(made) == 1
        now[0] += 1.0
        await ask(bed, "/metrics")
        assert len(made) == 2
