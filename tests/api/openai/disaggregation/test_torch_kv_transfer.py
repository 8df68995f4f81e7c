"""A real model behind the gateway: prefilled by one engine, decoded by another from KV that came over TCP."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from controller.core.types import InstanceSpec, Role
from tests.api.openai.disaggregation.disaggregated import transfers
from tests.api.openai.gateways import Answer, completion
from tests.api.openai.servers import ServerBed
from tests.workers.engine.client import COMPLETIONS, samples
from tests.workers.engine.process import EngineProcess
from tests.workers.engine.torch.bench import VOCABULARY, Bench, folder, program
from workers.engine.torch.kv.layout import TorchKv

pytestmark = [pytest.mark.torch, pytest.mark.long(45)]

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


@asynccontextmanager
async def pair(
    model: Path, *options: str
) -> AsyncIterator[tuple[EngineProcess, EngineProcess, aiohttp.ClientSession, ServerBed]]:
    """A prefill and a decode engine, and a gateway in front of them."""
    common = ("--executor", "torch", "--model", str(model), "--served-model-name", "demo", "--threads", "1")
    common = (*common, "--kv-cache-gib", "0.01", "--profile", "constant:5ms", "--shutdown-timeout", "0", *options)
    with EngineProcess(*common, "--role", "prefill") as p, EngineProcess(*common, "--role", "decode") as d:
        specs = [
            InstanceSpec("p", "demo", p.url, "reference", Role.PREFILL),
            InstanceSpec("d", "demo", d.url, "reference", Role.DECODE),
        ]
        async with aiohttp.ClientSession(auto_decompress=False) as session, ServerBed(specs, session) as bed:
            yield p, d, session, bed


async def alone(session: aiohttp.ClientSession, engine: EngineProcess, body: dict[str, Any]) -> list[str]:
    """What an engine that takes both stages answers."""
    async with session.post(f"{engine.url}{COMPLETIONS}", json={**body, "stream": True}) as answer:
        return pieces(await answer.text())


@pytest.mark.sampled(1)
@pytest.mark.parametrize("scheduler", ["continuous", "slackline"])
async def test_the_answer_is_the_single_engines_and_its_record_shows_the_stages(
    scheduler: str, fleet_token: str
) -> None:
    store = TorchKv(program(folder()).cache)
    whole = store.layers * store.token_bytes * PROMPT_TOKENS
    options = ("--max-num-batched-tokens", "64", "--no-enable-prefix-caching", "--scheduler", scheduler)
    async with pair(folder(), *options) as (p, d, session, bed):
        for number, stream in enumerate((True, False, True)):
            body: dict[str, Any] = completion(
                prompt=prompt(number), max_tokens=TOKENS, ignore_eos=True, temperature=0, stream=stream
            )
            answer = await bed.ask(body)
            assert (answer.status, answer.headers["x-slackline-instance"]) == (200, "d")
            tokens = await alone(session, d, body)
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


def first_token(asked: list[int]) -> int:
    """Which one is the likeliest behind this prompt."""
    bench = Bench(program(folder()))
    bench.add("a", asked, max_tokens=1)
    ((token,),) = bench.run().values()
    bench.close()
    return token


async def test_what_may_not_end_yet_is_decoded_where_answers_are_though_it_would_end_at_once(fleet_token: str) -> None:
    """The first token is the end of the sequence, and `min_tokens` forbids it: both engines have to know."""
    asked = prompt(0)[:40]
    model, least = folder("LlamaForCausalLM", "--eos", str(first_token(asked))), 8
    async with pair(model) as (p, d, session, bed):
        body: dict[str, Any] = completion(prompt=asked, max_tokens=TOKENS, temperature=0, stream=True)
        ended = await bed.ask(body)
        assert (ended.status, bed.sink.records[-1].output_tokens) == (200, 1), "without it there is one token"
        assert ended.headers["x-slackline-instance"] == "p", "and nothing to decode"
        answer = await bed.ask({**body, "min_tokens": least})
        assert (answer.status, answer.headers["x-slackline-instance"]) == (200, "d")
        assert pieces(answer.body.decode()) == await alone(session, d, {**body, "min_tokens": least})
        record = bed.sink.records[-1]
        assert (record.prefill_instance, record.output_tokens >= least) == ("p", True)
        async with aiohttp.ClientSession(p.url) as engine:
            assert (await samples(engine))["vllm:generation_tokens_total", ""] <= 3, "p never decoded an answer"


async def test_a_stop_token_is_told_to_both_stages(fleet_token: str) -> None:
    """One that comes first ends the answer where its prompt was computed; a later one where it is decoded."""
    asked = prompt(0)[:40]
    async with pair(folder()) as (_, d, session, bed):
        body: dict[str, Any] = completion(prompt=asked, max_tokens=TOKENS, temperature=0, ignore_eos=True)
        for stops, place, least in (([first_token(asked)], "p", 0), ([*range(0, VOCABULARY, 4)], "d", 1)):
            body |= {"stop_token_ids": stops, "min_tokens": least}
            answer = await bed.ask(body)
            assert (answer.status, answer.headers["x-slackline-instance"]) == (200, place)
            (choice,) = json.loads(answer.body)["choices"]
            async with session.post(f"{d.url}{COMPLETIONS}", json=body) as whole:
                (wanted,) = (await whole.json())["choices"]
            assert (choice, choice["finish_reason"]) == (wanted, "stop")
            assert choice["stop_reason"] in stops
        refused = await bed.ask({**body, "stop_token_ids": [VOCABULARY]})
        assert (refused.status, json.loads(refused.body)["error"]["param"]) == (400, "stop_token_ids")
