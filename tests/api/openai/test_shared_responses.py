"""Equal responses that share a call: each is a response of its own, told and stored as its own."""

from __future__ import annotations

import asyncio
import json

import pytest
from django.conf import settings

from tests.api.openai.gateways import TestBed
from tests.api.openai.protocol.responses import told
from tests.api.openai.response_gateways import PATH, call, ended, gateway, shown
from tests.api.openai.test_shared_calls import HANGS, SLOW, calls
from tests.waiting import until_on_loop
from workers import live
from workers.backends.fake import FakeBackend, Script


def asked(**changes):
    return {"model": "demo", "input": "hello", "temperature": 0, "share_call": True, **changes}


@pytest.mark.parametrize("stream", [False, True])
async def test_equal_responses_are_one_call_and_each_has_an_id_of_its_own(stream):
    async with TestBed() as bed:
        bed.every(SLOW)
        bodies = [asked(stream=stream, metadata={"workflow_id": name}) for name in "abc"]
        answers = await asyncio.gather(*(bed.ask(body, PATH) for body in bodies))
        assert [answer.status for answer in answers] == [200] * 3
        responses = [told(answer)[-1]["response"] if stream else json.loads(answer.body) for answer in answers]
        for answer, response, name in zip(answers, responses, "abc", strict=True):
            assert response["id"] == answer.headers["x-slackline-request-id"].replace("req-", "resp_")
            assert (response["status"], response["metadata"]) == ("completed", {"workflow_id": name})
            assert response["output"][0]["content"][0]["text"].strip() == "t0 t1 t2 t3"
            assert [response["usage"][f"{kind}_tokens"] for kind in ("input", "output")] == [8, 4]
            assert stream or int(answer.headers["content-length"]) == len(answer.body)
        assert len({response["id"] for response in responses}) == 3
        assert len(calls(bed)) == 1
        await until_on_loop(lambda: len(bed.sink.records) == 3)
        assert sorted(record.attempts for record in bed.sink.records) == [0, 0, 1]


async def test_one_that_comes_while_the_answer_is_streamed_has_all_of_it():
    async with TestBed() as bed:
        bed.every(Script(tokens=6, token_delay_s=0.05))
        first = bed.send(asked(stream=True), PATH)
        await until_on_loop(lambda: first.answer.body.count(b"output_text.delta") >= 4)
        second = bed.send(asked(stream=True), PATH)
        for answer in (await first.done(), await second.done()):
            events = told(answer)
            assert events[0]["type"] == "response.created"
            assert events[-1]["response"]["output"][0]["content"][0]["text"].strip() == "t0 t1 t2 t3 t4 t5"
        assert second.answer.headers["x-slackline-shared"] == first.answer.headers["x-slackline-request-id"]
        assert len(calls(bed)) == 1


async def test_a_chat_completion_and_a_response_are_not_equal():
    async with TestBed() as bed:
        bed.every(SLOW)
        chat = {"model": "demo", "messages": [{"role": "user", "content": "hello"}], "temperature": 0}
        answers = bed.ask(asked(), PATH), bed.ask({**chat, "share_call": True}, "/v1/chat/completions")
        assert [answer.status for answer in await asyncio.gather(*answers)] == [200, 200]
        assert len(calls(bed)) == 2


@pytest.mark.parametrize("stream", [False, True])
async def test_a_call_that_fails_fails_for_each(stream):
    async with TestBed() as bed:
        bed.every(Script(cut_after=2, first_delay_s=0.1) if stream else Script(refuse_status=400, first_delay_s=0.1))
        for answer in await asyncio.gather(*(bed.ask(asked(stream=stream), PATH) for _ in range(2))):
            if stream:
                failed, error = told(answer)[-2:]
                assert (failed["type"], error["type"], error["code"]) == ("response.failed", "error", "engine_failed")
            else:
                assert (answer.status, answer.error["type"]) == (400, "invalid_request_error")


async def test_the_first_one_cancelled_does_not_end_the_second():
    async with TestBed() as bed:
        bed.every(Script(tokens=6, token_delay_s=0.05))
        first, second = bed.send(asked(stream=True), PATH), bed.send(asked(stream=True), PATH)
        await until_on_loop(lambda: first.answer.body.count(b"output_text.delta") >= 4)
        await first.hang_up()
        assert told(await second.done())[-1]["type"] == "response.completed"


async def test_an_answer_that_cannot_be_read_fails_for_each_and_counts_as_failed(monkeypatch):
    async def unreadable(self, call):
        await asyncio.sleep(0.1)
        async for chunk in generate(self, call):
            yield chunk if chunk.kind != "body" else chunk._replace(raw=b'{"choices": []}')

    generate = FakeBackend.generate
    monkeypatch.setattr(FakeBackend, "generate", unreadable)
    async with TestBed() as bed:
        answers = await asyncio.gather(*(bed.ask(asked(), PATH) for _ in range(2)))
        assert [(answer.status, answer.error["code"]) for answer in answers] == [(502, "engine_failed")] * 2
        await until_on_loop(lambda: len(bed.sink.records) == 2)
        assert {record.outcome for record in bed.sink.records} == {"failed"}


# ---- stored ---------------------------------------------------------------------------------------------------------


@pytest.mark.db
async def test_each_is_stored_and_one_in_the_background_shares_too(redis_server):
    live._client(settings.REDIS_URL).flushdb()
    async with gateway("gw-a") as one, gateway("gw-b") as two:
        one.every(SLOW)
        behind = json.loads((await one.ask(asked(background=True), PATH)).body)
        before = json.loads((await one.ask(asked(), PATH)).body)
        assert len(calls(one)) == 1
        assert await shown(two, before["id"]) == before
        assert (await ended(two, behind["id"]))["output"][0]["content"] == before["output"][0]["content"]
        await shown(two, behind["id"], method="DELETE")
        assert (await call(two, before["id"])).status == 200


@pytest.mark.db
async def test_one_in_the_background_is_cancelled_alone(redis_server):
    live._client(settings.REDIS_URL).flushdb()
    async with gateway("gw-a") as one, gateway("gw-b") as two:
        one.every(HANGS)
        first, second = [json.loads((await one.ask(asked(background=True), PATH)).body) for _ in range(2)]
        await shown(two, first["id"], "/cancel", "POST")
        await until_on_loop(lambda: one.sink.records)
        assert (await shown(two, second["id"]))["status"] == "in_progress"
        await shown(two, second["id"], "/cancel", "POST")
        await until_on_loop(lambda: len(one.sink.records) == 2)
        await until_on_loop(lambda: sum(one.backend(name).running for name in ("e1", "e2")) == 0)
