"""An engine that counts wrongly, or lies: its tenant's quota, other requests' records and the live state must not pay.

Found by attack: one answer with `completion_tokens: 999999999999999` shut its tenant out for centuries, a figure of
more than 64 bits stopped the publisher, and a negative one left the request without a record.
"""

from __future__ import annotations

import json
import logging
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import aiohttp
import orjson
import pytest
from aiohttp import web

from api.openai import status
from controller.core.snapshot import TenantConfig
from controller.core.types import InstanceSpec, record_as_dict
from tests.api.openai.gateways import Answer, completion
from tests.api.openai.servers import ServerBed
from tests.waiting import until_on_loop
from workers.backends.base import MOST_TOLD_TOKENS
from workers.backends.vllm import parse_load

TPM = 5_000
CONTEXT = 1_000  # of the model in `snapshot()`
PROMPT, MOST = 3, 4  # of `completion()`
FALSE = (
    '{"prompt_tokens": 8, "completion_tokens": 999999999999999}',
    '{"prompt_tokens": 1.7e308, "completion_tokens": 1.7e308}',
    '{"prompt_tokens": 8, "completion_tokens": -7}',
    '{"prompt_tokens": -9000000, "completion_tokens": 2}',
    '{"prompt_tokens": 2000000000, "completion_tokens": 2000000000}',
    '{"prompt_tokens": true, "completion_tokens": "1e9"}',
)


class Liar:
    """A vLLM server that answers two tokens and says `usage` of them; `page` is its metrics page."""

    def __init__(self) -> None:
        self.usage = '{"prompt_tokens": 3, "completion_tokens": 2}'
        self.page = "vllm:num_requests_running 0\n"
        self.app = web.Application()
        self.app.router.add_get("/health", self._health)
        self.app.router.add_get("/metrics", self._metrics)
        self.app.router.add_post("/v1/completions", self._answer)
        self.app.router.add_post("/v1/chat/completions", self._answer)

    async def _health(self, request: web.Request) -> web.Response:
        return web.Response()

    async def _metrics(self, request: web.Request) -> web.Response:
        return web.Response(text=self.page)

    async def _answer(self, request: web.Request) -> web.Response:
        body = await request.json()
        chat = "chat" in request.path
        if body.get("stream"):
            said = '{"delta": {"content": "a"}}' if chat else '{"index": 0, "text": "a", "finish_reason": null}'
            tokens = f'data: {{"choices": [{said}]}}\n\n' * 2
            text = f'{tokens}data: {{"choices": [], "usage": {self.usage}}}\n\ndata: [DONE]\n\n'
            return web.Response(text=text, content_type="text/event-stream")
        said = '"message": {"role": "assistant", "content": "aa"}' if chat else '"text": "aa"'
        text = f'{{"choices": [{{"index": 0, {said}, "finish_reason": "stop"}}], "usage": {self.usage}}}'
        return web.Response(text=text, content_type="application/json")


@pytest.fixture
def liar() -> Liar:
    return Liar()


@pytest.fixture
async def bed(liar: Liar) -> AsyncIterator[ServerBed]:
    runner = web.AppRunner(liar.app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    async with aiohttp.ClientSession(auto_decompress=False) as session:
        bed = ServerBed([InstanceSpec("e1", "demo", url=url, backend="vllm")], session)
        bed.config = replace(bed.config, tenants=(TenantConfig(1, "acme", "chat", tpm=TPM),))
        async with bed:
            yield bed
    await runner.cleanup()


async def recorded(bed: ServerBed, answer: Answer, number: int) -> None:
    assert answer.status == 200, answer.body
    await until_on_loop(lambda: len(bed.sink.records) == number)


def orderly(bed: ServerBed) -> None:
    """What follows from one answer: a record that the database takes, live state that can be encoded, counters."""
    for record in bed.sink.records:
        assert 0 <= record.prompt_tokens <= CONTEXT
        assert 0 <= record.output_tokens <= CONTEXT
        orjson.dumps(record_as_dict(record))
    orjson.dumps(status.fleet_message(bed.gateway, 1, status.windows(bed.gateway, bed.gateway.clock())))
    page = bed.gateway.instruments.page().decode()
    assert (
        f'slackline_requests_total{{code="",outcome="ok",slo_class="chat",tenant="acme"}} {len(bed.sink.records)}.0'
        in page
    )


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("usage", FALSE)
async def test_a_false_count_costs_its_tenant_no_more_than_the_request_may_have_needed(
    bed: ServerBed, liar: Liar, usage: str, streamed: bool
) -> None:
    liar.usage = usage
    await recorded(bed, await bed.ask(completion(stream=streamed)), 1)
    liar.usage = '{"prompt_tokens": 3, "completion_tokens": 2}'
    await recorded(bed, await bed.ask(completion()), 2)
    orderly(bed)
    tokens = bed.gateway.quotas._usage["acme"].tokens
    assert tokens is not None
    assert TPM - (CONTEXT + MOST) - (PROMPT + 2) <= tokens.level <= TPM
    false, honest = bed.sink.records
    assert false.output_tokens <= MOST, "no more than it asked for"
    assert (honest.prompt_tokens, honest.output_tokens) == (PROMPT, 2)


async def test_a_count_beyond_what_was_asked_is_said_once_for_each_instance(
    bed: ServerBed, liar: Liar, caplog: pytest.LogCaptureFixture
) -> None:
    liar.usage = FALSE[4]
    with caplog.at_level(logging.WARNING):
        for number in (1, 2, 3):
            await recorded(bed, await bed.ask(completion()), number)
    assert len([each for each in caplog.records if "e1 counts" in each.getMessage()]) == 1
    assert [record.output_tokens for record in bed.sink.records] == [MOST] * 3


@pytest.mark.parametrize("usage", FALSE)
async def test_a_response_repeats_no_false_count(bed: ServerBed, liar: Liar, usage: str) -> None:
    liar.usage = usage
    answer = await bed.ask({"model": "demo", "input": "x"}, "/v1/responses")
    told: dict[str, Any] = json.loads(answer.body)["usage"]
    assert all(0 <= told[name] <= MOST_TOLD_TOKENS for name in ("input_tokens", "output_tokens"))


@pytest.mark.parametrize("value", ["1.7e308", "-5", "9.3e18"])
async def test_telemetry_beyond_all_counts_makes_its_instance_silent_and_nothing_else(
    bed: ServerBed, liar: Liar, value: str
) -> None:
    seen_at = bed.gateway.fleet.seats["e1"].seen_at
    liar.page = f"vllm:num_requests_running {value}\nvllm:prompt_tokens_total {value}\n"
    assert parse_load(liar.page, 0.0).prompt_tokens_total != 0, "readable as a page"
    bed.gateway.monitor.probe("e1")
    await bed.gateway.monitor.settle(5)
    assert bed.gateway.fleet.seats["e1"].seen_at == seen_at, "nothing was heard of it"
    orjson.dumps(status.fleet_message(bed.gateway, 1, []))
    (told,) = status.instances(bed.gateway, bed.gateway.clock())
    assert 0 <= told["running"] < 1_000
    orjson.dumps(dict(bed.gateway.monitor._published))
