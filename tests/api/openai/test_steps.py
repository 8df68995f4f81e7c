"""Steps of workflows whose answers are kept: through two gateways and a real Redis, from the client to the records."""

from __future__ import annotations

import asyncio
import json
import logging
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest
from django.conf import settings

from tests.api.openai import workflow_gateways
from tests.api.openai.gateways import completion
from tests.api.openai.workflow_gateways import OTHER
from tests.waiting import until_on_loop
from workers import live, steps
from workers.backends.fake import Script
from workers.workflows import read_workflow

pytestmark = pytest.mark.db
AWAY = "redis://127.0.0.1:1/0"
CHAT = "/v1/chat/completions"


@pytest.fixture(autouse=True)
def empty(redis_server):
    live._client(settings.REDIS_URL).flushdb()


@asynccontextmanager
async def gateway(name="gw-a", url=None, retention_s=60, **others):
    async with workflow_gateways.gateway(name, url) as bed:
        keeps(bed, retention_s, **others)
        yield bed


def keeps(bed, retention_s, **others):
    found = bed.gateway.snapshot
    tenants = tuple(replace(each, retention_s=others.get(each.name, retention_s)) for each in found.tenants)
    bed.gateway.configure(replace(found, tenants=tenants, version=found.version + 1))


def step(key="s1", workflow="w1", **fields):
    return completion(metadata={"workflow_id": workflow, "step_key": key}, **fields)


def chat(key="s1", **fields):
    said = [{"role": "user", "content": "plan"}]
    return {"model": "demo", "messages": said, "metadata": {"workflow_id": "w1", "step_key": key}, **fields}


def calls(*beds):
    return sum(len(bed.backend(name).calls) for bed in beds for name in bed.gateway.fleet.backends)


async def kept(bed, count=1):
    await until_on_loop(lambda: bed.gateway.steps.counts["kept"] >= count)


def names():
    return sorted(key.decode() for key in live._client(settings.REDIS_URL).keys("answers:*"))


# ---- resumed --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("first_streamed", [False, True])
@pytest.mark.parametrize("then_streamed", [False, True])
async def test_a_step_that_has_ended_is_answered_at_another_gateway_without_new_tokens(first_streamed, then_streamed):
    async with gateway("gw-a") as one, gateway("gw-b") as two:
        first = await one.ask(step(stream=first_streamed))
        await kept(one)
        again = await two.ask(step(stream=then_streamed))
        assert (first.status, again.status, calls(one, two)) == (200, 200, 1)
        assert text(again, then_streamed).split() == text(first, first_streamed).split() == ["t0", "t1", "t2", "t3"]
        assert again.headers["x-slackline-stored"] == first.headers["x-slackline-request-id"]
        (record,) = two.sink.records
        assert (record.outcome, record.attempts, record.output_tokens, record.prompt_tokens) == ("ok", 0, 4, 8)
        stored = next(each for each in record.decisions if each["kind"] == "step")
        assert stored["reason"] == "stored_step"
        assert stored["figures"]["of_request"] == first.headers["x-slackline-request-id"]
        assert two.gateway.steps.counts["found"] == 1


def text(answer, streamed):
    if not streamed:
        return json.loads(answer.body)["choices"][0]["text"]
    assert answer.events[-1] == "[DONE]"
    found = [json.loads(event) for event in answer.events[:-1]]
    return "".join(each["choices"][0]["text"] for each in found if each["choices"])


async def test_a_stream_tells_its_tokens_if_it_is_to():
    async with gateway() as bed:
        await bed.ask(step())
        await kept(bed)
        answer = await bed.ask(chat(stream=True, stream_options={"include_usage": True}), CHAT)
        assert answer.status == 409, "a completion's step is not a chat's"
        await bed.ask(chat("s2"), CHAT)
        await kept(bed, 2)
        answer = await bed.ask(chat("s2", stream=True, stream_options={"include_usage": True}), CHAT)
        *parts, usage, done = answer.events
        told = json.loads(usage)["usage"]
        assert (done, told["prompt_tokens"], told["completion_tokens"]) == ("[DONE]", 8, 4)
        deltas = [json.loads(part)["choices"][0]["delta"] for part in parts]
        assert deltas[0]["content"] == "t0 t1 t2 t3"


async def test_a_response_is_resumed_too():
    body = {"model": "demo", "input": "plan", "metadata": {"workflow_id": "w1", "step_key": "s1"}}
    async with gateway() as bed:
        first = await bed.ask(body, "/v1/responses")
        await kept(bed)
        again = await bed.ask({**body, "stream": True}, "/v1/responses")
        assert calls(bed) == 1
        said = json.loads(first.body)["output"][0]["content"][0]["text"]
        assert said in again.body.decode()
        assert "response.completed" in again.body.decode()


async def test_a_resumed_step_costs_a_request_and_no_tokens():
    async with gateway() as bed:
        found = bed.gateway.snapshot
        acme, other = found.tenants
        bed.gateway.configure(replace(found, tenants=(replace(acme, rpm=2, tpm=1000), other)))
        await bed.ask(step())
        await kept(bed)
        before = int(dict(bed.gateway.quotas.headers("acme"))[b"x-ratelimit-remaining-tokens"])
        assert (await bed.ask(step())).status == 200
        assert int(dict(bed.gateway.quotas.headers("acme"))[b"x-ratelimit-remaining-tokens"]) >= before
        assert (await bed.ask(step())).status == 429
        assert bed.gateway.quotas.active("acme") == 0


async def test_the_workflow_counts_the_request_and_not_its_tokens_again():
    async with gateway() as bed:
        await bed.ask(step(workflow_deadline=30))
        await kept(bed)
        await bed.ask(step())
        told = json.loads((await bed.ask(b"", "/v1/workflows/w1", method="GET")).body)
        assert (told["requests"], told["answered"], told["output_tokens"]) == (2, 2, 4)


async def test_whose_metadata_and_user_it_is_does_not_matter():
    async with gateway() as bed:
        await bed.ask(step(user="a"))
        await kept(bed)
        body = step(user="b")
        body["metadata"]["trace"] = "2"
        assert (await bed.ask(body)).status == 200
        assert calls(bed) == 1


async def test_steps_of_a_call_that_requests_share_are_each_kept():
    async with gateway() as bed:
        bed.every(Script(first_delay_s=0.1))
        bodies = [step("a", temperature=0, share_call=True), step("b", temperature=0, share_call=True)]
        await asyncio.gather(*map(bed.ask, bodies))
        await kept(bed, 2)
        again = [await bed.ask(body) for body in bodies]
        assert calls(bed) == 1
        assert [text(answer, False) for answer in again] == ["t0 t1 t2 t3"] * 2


# ---- not resumed ----------------------------------------------------------------------------------------------------


async def test_a_step_with_another_body_is_refused_and_changes_nothing():
    async with gateway() as bed:
        await bed.ask(step())
        await kept(bed)
        for other in (step(max_tokens=5), step(prompt=[3, 2, 1]), step(temperature=0)):
            answer = await bed.ask(other)
            assert (answer.status, answer.error["code"]) == (409, "step_exists")
            assert answer.error["param"] == "metadata.step_key"
            assert answer.headers["x-should-retry"] == "false"
        assert calls(bed) == 1
        assert (await bed.ask(step())).status == 200


async def test_other_steps_workflows_and_tenants_are_computed():
    async with gateway() as bed:
        await bed.ask(step())
        await kept(bed)
        await bed.ask(step("s2"))
        await bed.ask(step(workflow="w2"))
        await bed.ask(step(), key=OTHER)
        await bed.ask(completion(metadata={"workflow_id": "w1"}))
        assert calls(bed) == 5


async def test_what_did_not_end_well_is_computed_again():
    async with gateway() as bed:
        bed.every(Script(cut_after=2))
        await bed.ask(step(stream=True))
        bed.every(Script(hang_after=2))
        client = bed.send(step(stream=True))
        await until_on_loop(lambda: client.answer.body)
        await client.hang_up()
        assert names() == []
        bed.every(Script())
        assert (await bed.ask(step())).status == 200
        await kept(bed)


async def test_nothing_is_kept_without_a_retention():
    async with gateway(retention_s=0) as bed:
        answer = await bed.ask(step(workflow_deadline=20))
        assert (answer.status, answer.error["param"]) == (403, "metadata.step_key")
        assert live.run(read_workflow("acme", "w1")) is None, "what is refused begins no workflow"
        assert (await bed.ask(completion(metadata={"workflow_id": "w1"}))).status == 200
        assert names() == []


async def test_nothing_is_kept_that_was_not_asked_to_be():
    async with gateway() as bed:
        await bed.ask(completion(metadata={"workflow_id": "w1"}, workflow_deadline=20))
        assert names() == []


@pytest.mark.parametrize(
    ("metadata", "field"),
    [
        ({"step_key": "s1"}, "metadata.step_key"),
        ({"step_key": 5, "workflow_id": "w1"}, "metadata.step_key"),
        ({"step_key": "s" * 121, "workflow_id": "w1"}, "metadata.step_key"),
        ({"step_key": "s1", "workflow_id": "w1", "state_ref": "a "}, "metadata.state_ref"),
        ({"step_key": "s1", "workflow_id": "w1", "state_ref": " "}, "metadata.state_ref"),
    ],
)
async def test_bad_input_names_its_field(metadata, field):
    async with gateway() as bed:
        answer = await bed.ask(completion(metadata=metadata))
        assert (answer.status, answer.error["param"]) == (400, field)


# ---- forgotten ------------------------------------------------------------------------------------------------------


async def test_an_answer_ends_with_the_retention():
    async with gateway(retention_s=1) as bed:
        await bed.ask(step())
        await kept(bed)
        await until_on_loop(lambda: not [name for name in names() if "|" in name and not name.endswith("|bytes")])
        await bed.ask(step())
        assert calls(bed) == 2


async def test_a_tenant_that_keeps_answers_less_long_has_them_forgotten():
    async with gateway(other=60) as bed:
        await bed.ask(step())
        await bed.ask(step(), key=OTHER)
        await kept(bed, 2)
        keeps(bed, 0, other=60)
        await until_on_loop(lambda: bed.gateway.steps.counts["forgotten"] == 1)
        assert all(name.startswith("answers:other") for name in names())


async def test_a_cancelled_workflow_is_forgotten():
    async with gateway("gw-a") as one, gateway("gw-b"):
        await one.ask(step(workflow_deadline=30))
        await one.ask(step(workflow="w2"))
        await kept(one, 2)
        await one.ask(b"", "/v1/workflows/w1/cancel")
        await until_on_loop(lambda: not [name for name in names() if name.endswith(":w1")])
        await one.ask(step(workflow="w2"))
        assert calls(one) == 2
        assert (await one.ask(step())).error["code"] == "cancelled"


async def test_a_client_may_have_its_steps_forgotten():
    async with gateway("gw-a") as one, gateway("gw-b") as two:
        for key in ("s1", "s2"):
            await one.ask(step(key, workflow="a/b"))
        await one.ask(step(workflow="a/b"), key=OTHER)
        await kept(one, 3)
        told = await two.ask(b"", "/v1/workflows/a/b/steps", method="DELETE")
        assert (told.status, json.loads(told.body)) == (200, {"object": "workflow.steps", "deleted": 2})
        assert json.loads((await two.ask(b"", "/v1/workflows/a/b/steps", method="DELETE")).body)["deleted"] == 0
        assert all(name.startswith("answers:other") for name in names())
        assert (await two.ask(b"", "/v1/workflows/a/b/steps", key="sk-no", method="DELETE")).status == 401


# ---- bounds and faults ----------------------------------------------------------------------------------------------


async def test_the_number_and_bytes_of_a_tenants_answers_are_bounded(monkeypatch):
    monkeypatch.setattr(steps, "MOST_STEPS", 3)
    async with gateway() as bed:
        for number in range(5):
            await bed.ask(step(f"s{number}"))
            await kept(bed, number + 1)
        client = live._client(settings.REDIS_URL)
        assert client.zcard("answers:acme") == 3
        one = client.strlen(next(name for name in names() if name.endswith(":w1")))
        assert int(client.get("answers:acme|bytes")) == pytest.approx(3 * one, rel=0.1)
        monkeypatch.setattr(steps, "MOST_BYTES", int(1.5 * one))
        await bed.ask(step("s5"))
        await kept(bed, 6)
        assert client.zcard("answers:acme") == 1
        monkeypatch.setattr(steps, "MOST_BYTES", one // 2)
        await bed.ask(step("s6"))
        await until_on_loop(lambda: bed.gateway.steps.counts["full"] == 1)
        assert (await bed.ask(step("s6"))).status == 200, "it is computed again"
        assert client.smembers("answers:acme||w1") == set()


async def test_an_answer_that_is_too_large_is_not_kept(monkeypatch):
    monkeypatch.setattr("api.openai.steps.LARGEST_BYTES", 100)
    async with gateway() as bed:
        assert (await bed.ask(step())).status == 200
        assert bed.gateway.steps.counts == {"too_large": 1}
        monkeypatch.setattr("api.openai.gateway.LARGEST_BYTES", 1)
        assert (await bed.ask(step(stream=True))).events[-1] == "[DONE]"
        assert bed.gateway.steps.counts == {"too_large": 2}
        assert names() == []


async def test_without_redis_steps_are_computed():
    async with gateway(url=AWAY) as bed:
        assert [(await bed.ask(step())).status for _ in range(2)] == [200, 200]
        await until_on_loop(lambda: bed.gateway.steps.counts["unwritten"] == 2)
        assert bed.gateway.steps.counts["unread"] == 2
        refused = await bed.ask(b"", "/v1/workflows/w1/steps", method="DELETE")
        assert (refused.status, refused.error["code"]) == (503, "workflows_unavailable")


@pytest.mark.parametrize("raw", [b"", b"{", b"[]", b'{"by": 1}', b'{"by":"a","kept_at":"x","asked":"zz","whole":{}}'])
async def test_what_cannot_be_read_is_computed_again(raw):
    async with gateway() as bed:
        await bed.ask(step())
        await kept(bed)
        client = live._client(settings.REDIS_URL)
        (name,) = [name for name in names() if name.endswith(":w1") and "||" not in name]
        client.set(name, raw)
        assert (await bed.ask(step())).status == 200
        assert calls(bed) == 2
        assert bed.gateway.steps.counts["unreadable"] == 1


async def test_no_name_reaches_another_tenants_or_workflows_answers():
    async with gateway() as bed:
        for workflow in ("w1", "w1:w1", "|w1", "bytes", "w|1"):
            await bed.ask(step(workflow=workflow))
        await kept(bed, 5)
        assert (await bed.ask(b"", "/v1/workflows/w1/steps", method="DELETE")).status == 200
        for workflow in ("w1:w1", "|w1", "bytes", "w|1"):
            assert "x-slackline-stored" in (await bed.ask(step(workflow=workflow))).headers
        assert calls(bed) == 5


class Slowly:
    """A Redis that forgets one answer of whoever asks, after a moment."""

    async def run(self, dialogue):
        await asyncio.sleep(0.01)
        return 1


async def test_while_redis_is_away_the_log_gets_a_line_and_not_one_for_each_step(caplog):
    caplog.set_level(logging.INFO)
    async with gateway("gw-a", AWAY) as bed:
        for number in range(5):
            await bed.ask(step(f"s{number}"))
        await until_on_loop(lambda: bed.gateway.steps.counts["unwritten"] == 5)
        for number in range(5):
            bed.gateway.steps.forget("acme", f"w{number}")
        await until_on_loop(lambda: "answers of steps were not forgotten" in caplog.text)
        await asyncio.sleep(0.2)
    assert caplog.text.count("the answer of a step was not kept") == 1
    assert caplog.text.count("answers of steps were not forgotten") == 1


async def test_what_is_forgotten_of_several_tenants_at_once_is_all_counted():
    async with gateway(retention_s=60, other=60) as bed:
        bed.gateway.steps.board = Slowly()
        keeps(bed, 0)
        await until_on_loop(lambda: bed.gateway.steps.counts["forgotten"] >= 2, 5)
        assert bed.gateway.steps.counts["forgotten"] == 2


# ---- given up -------------------------------------------------------------------------------------------------------


async def test_a_step_that_its_client_gave_up_and_asks_for_again_leaves_its_workflow_in_time():
    async with gateway() as bed:
        await bed.ask(step("plan", workflow_deadline=30))
        bed.every(Script(hang_after=1))
        client = bed.send(step("write", stream=True))
        await until_on_loop(lambda: client.answer.body)
        await client.hang_up()
        await until_on_loop(lambda: len(bed.sink.records) == 2)
        told = await of_workflow(bed)
        assert (told["requests"], told["answered"], told["failed"], told["running"]) == (1, 1, 0, 0)
        bed.every(Script())
        await bed.ask(step("write"))
        told = await of_workflow(bed)
        assert (told["requests"], told["answered"], told["failed"], told["in_time"]) == (2, 2, 0, True)
        assert told["goodput_tokens"] == 8


async def of_workflow(bed):
    return json.loads((await bed.ask(b"", "/v1/workflows/w1", method="GET")).body)


async def test_the_tokens_of_a_shared_call_count_once_for_their_workflow():
    async with gateway() as bed:
        bed.every(Script(first_delay_s=0.1))
        body = step(temperature=0, share_call=True, workflow_deadline=30)
        await asyncio.gather(bed.ask(body), bed.ask({**body, "metadata": {"workflow_id": "w1"}}))
        assert calls(bed) == 1
        told = await of_workflow(bed)
        assert (told["answered"], told["output_tokens"]) == (2, 4)
