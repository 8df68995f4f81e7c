"""A real model behind the gateway: prefilled by one engine, decoded by another from KV that came over TCP."""

from __future__ import annotations

import json
from typing import Any

import aiohttp
import pytest

from controller.core.types import InstanceSpec, Role
from tests.api.openai.gateways import Answer, completion
from tests.api.openai.handoffs import transfers
from tests.api.openai.servers import ServerBed
from tests.workers.engine.client import COMPLETIONS, samples
from tests.workers.engine.process import FLEET, EngineProcess
from tests.workers.engine.torch_bench import VOCABULARY, folder, program
from workers.engine.torch_kv import TorchKv

pytestmark = pytest.mark.torch

PROMPT_TOKENS, TOKENS = 300, 20


def prompt(number: int) -> list[int]:
    return [(11 * i + number) % VOCABULARY for i in range(PROMPT_TOKENS)]


def pieces(body: str) -> list[str]:
    """What each token of a stream says."""
    events = [event.removeprefix("data: ") for event in body.split("\n\n") if event.startswith("data: {")]
    return [choice["text"] for event in events for choice in json.loads(event)["choices"]]


def text_of(answer: Answer, stream: bool) -> str:
    body = answer.body.decode()
    return "".join(pieces(body)) if stream else json.loads(body)["choices"][0]["text"]


@pytest.mark.parametrize("scheduler", ["continuous", "slackline"])
async def test_the_answer_is_the_single_engines_and_its_record_shows_the_stages(monkeypatch, scheduler: str) -> None:
    monkeypatch.setenv("FLEET_TOKEN", FLEET["token"])
    common = ("--executor", "torch", "--model", str(folder()), "--served-model-name", "demo", "--threads", "1")
    options = (*common, "--kv-cache-gib", "0.01", "--profile", "constant:5ms", "--shutdown-timeout", "0")
    options = (*options, "--max-num-batched-tokens", "64", "--no-enable-prefix-caching", "--scheduler", scheduler)
    store = TorchKv(program(folder()).cache)
    whole = store.layers * store.token_bytes * PROMPT_TOKENS
    with (
        EngineProcess(*options, "--role", "prefill") as p,
        EngineProcess(*options, "--role", "decode") as d,
    ):
        specs = [
            InstanceSpec("p", "demo", p.url, "reference", Role.PREFILL),
            InstanceSpec("d", "demo", d.url, "reference", Role.DECODE),
        ]
        async with aiohttp.ClientSession(auto_decompress=False) as session, ServerBed(specs, session) as bed:
            for number, stream in enumerate((True, False, True)):
                body: dict[str, Any] = completion(
                    prompt=prompt(number), max_tokens=TOKENS, ignore_eos=True, temperature=0, stream=stream
                )
                answer = await bed.ask(body)
                assert (answer.status, answer.headers["x-slackline-instance"]) == (200, "d")
                async with session.post(f"{d.url}{COMPLETIONS}", json={**body, "stream": True}) as alone:
                    tokens = pieces(await alone.text())
                assert len(tokens) == TOKENS
                assert text_of(answer, stream) == "".join(tokens)
                if stream:
                    assert pieces(answer.body.decode()) == tokens
                record = bed.sink.records[-1]
                assert (record.outcome, record.prefill_instance, record.instance) == ("ok", "p", "d")
                steps = [step["kind"] for step in record.decisions]
                assert sorted(steps) == ["dispatch", "place", "prefill", "slo", "transfer"]
                assert steps.index("dispatch") < min(steps.index("place"), steps.index("prefill"))
                assert steps.index("place") < steps.index("transfer")
                (one,) = transfers(bed)
                assert (one["outcome"], one["state"], one["measured_by"]) == ("done", "released", "engine")
                assert (one["source"], one["instance"], one["attempt"]) == ("p", "d", 1)
                assert (one["bytes"], one["tokens"], one["layers"]) == (whole, PROMPT_TOKENS, store.layers)
                assert 0 <= one["early_bytes"] <= whole  # all: the end of the step may be heard late
            for url in (p.url, d.url):
                async with aiohttp.ClientSession(url) as engine:
                    assert (await samples(engine))["vllm:kv_cache_usage_perc", ""] == 0
