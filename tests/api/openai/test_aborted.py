"""Real engines that give up what they compute: it ends under HTTP 200, and is served elsewhere or told as a failure."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Sequence

import aiohttp
import pytest

from controller.core.types import InstanceSpec
from tests.api.openai.gateways import completion, settled
from tests.api.openai.servers import ServerBed
from tests.waiting import until_on_loop
from tests.workers.engine.client import metric, post
from tests.workers.engine.process import FLEET, EngineProcess

OPTIONS = ("--profile", "constant:50ms", "--model", "demo", "--shutdown-timeout", "0")
TOKENS = 20  # of an answer: a second


@pytest.fixture(scope="module")
def engine_options() -> dict[str, Sequence[str]]:
    return {"e1": OPTIONS, "e2": OPTIONS}


@pytest.fixture
async def bed(engines: dict[str, EngineProcess]) -> AsyncIterator[ServerBed]:
    specs = [InstanceSpec(name, "demo", url=engine.url, backend="reference") for name, engine in engines.items()]
    async with aiohttp.ClientSession(auto_decompress=False) as session, ServerBed(specs, session) as bed:
        yield bed


async def abort(engine: EngineProcess) -> None:
    body = {"request_ids": [], **FLEET}
    async with aiohttp.ClientSession() as session:
        assert (await post(session, engine.url + "/abort_requests", body))[0] == 200


async def runs(http: aiohttp.ClientSession) -> bool:
    return await metric(http, "num_requests_running") > 0


async def test_an_answer_given_up_before_anything_was_sent_comes_from_another_engine(
    bed: ServerBed, engines: dict[str, EngineProcess]
) -> None:
    client = bed.send(completion(max_tokens=TOKENS, ignore_eos=True))
    await until_on_loop(lambda: any(in_flight.instance for in_flight in bed.gateway.runtime.requests.values()))
    (first,) = [in_flight.instance for in_flight in bed.gateway.runtime.requests.values()]
    async with aiohttp.ClientSession(engines[first].url) as http:
        await until_on_loop(lambda: runs(http), what="it is being computed")
    await abort(engines[first])
    answer = await client.done()
    assert (answer.status, json.loads(answer.body)["usage"]["completion_tokens"]) == (200, TOKENS)
    (record,) = bed.sink.records
    assert (record.outcome, record.attempts) == ("ok", 2)
    assert record.instance != first


async def test_a_stream_given_up_after_its_first_token_ends_with_an_error_event(
    bed: ServerBed, engines: dict[str, EngineProcess]
) -> None:
    client = bed.send(completion(max_tokens=TOKENS, ignore_eos=True, stream=True))
    await until_on_loop(lambda: client.answer.body)
    await abort(engines[client.answer.headers["x-slackline-instance"]])
    answer = await client.done()
    assert json.loads(answer.events[-1])["error"]["code"] == "engine_failed"
    assert "[DONE]" not in answer.events
    (record,) = bed.sink.records
    assert (record.outcome, record.attained, record.attempts) == ("cut", False, 1)


async def test_what_its_client_gave_up_stays_a_cancellation(bed: ServerBed) -> None:
    client = bed.send(completion(max_tokens=TOKENS, ignore_eos=True, stream=True))
    await until_on_loop(lambda: client.answer.body)
    await client.hang_up()
    await until_on_loop(lambda: bed.sink.records)
    await settled()
    assert [record.outcome for record in bed.sink.records] == ["cancelled"]
