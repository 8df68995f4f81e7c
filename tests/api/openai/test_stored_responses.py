"""Stored responses: through two gateways and a real Redis, read, gone on from, deleted."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace

import pytest
from django.conf import settings

from api.openai.stored_responses import ended_by
from tests.api.openai.protocol.responses import told
from tests.api.openai.response_gateways import PATH, ask, asked, call, ended, gateway, messages, shown
from tests.api.openai.test_steps import AWAY, calls, keeps, names
from tests.api.openai.workflow_gateways import OTHER
from tests.waiting import until_on_loop
from workers import live, stored_responses
from workers.backends.fake import Script

pytestmark = pytest.mark.db
NO_ONE = "resp_" + "0" * 24


@pytest.fixture(autouse=True)
def empty(redis_server):
    live._client(settings.REDIS_URL).flushdb()


@pytest.fixture(autouse=True)
def often(monkeypatch):
    monkeypatch.setattr("api.openai.stored_responses.RENEW_S", 0.05)


# ---- kept and read --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("store", [{}, {"store": None}, {"store": True}])
async def test_a_response_is_read_at_another_gateway(store):
    async with gateway("gw-a") as one, gateway("gw-b") as two:
        made = await ask(one, asked(**store))
        assert (made["store"], made["background"], made["previous_response_id"]) == (True, False, None)
        assert await shown(two, made["id"]) == made
        assert calls(two) == 0


async def test_a_streamed_response_is_kept_before_its_end_is_sent():
    async with gateway() as bed:
        answer = await bed.ask(asked(stream=True), PATH)
        last = json.loads(answer.body.decode().strip().rpartition("data: ")[2])
        assert last["type"] == "response.completed"
        assert await shown(bed, last["response"]["id"]) == last["response"]


async def test_nothing_is_kept_that_its_client_does_not_want_kept():
    async with gateway() as bed:
        made = await ask(bed, asked(store=False))
        assert (made["store"], names()) == (False, [])
        assert (await call(bed, made["id"])).status == 404


async def test_nothing_is_kept_without_a_retention():
    async with gateway(retention_s=0) as bed:
        made = await ask(bed, asked())
        assert (made["store"], names()) == (False, [])
        for field in ("store", "background"):
            refused = await bed.ask(asked(**{field: True}), PATH)
            assert (refused.status, refused.error["param"]) == (400, field)
            assert "retention_s is 0" in refused.error["message"]
        assert (await call(bed, made["id"])).status == 404


async def test_what_failed_is_not_kept():
    async with gateway() as bed:
        bed.every(Script(cut_after=2))
        await bed.ask(asked(stream=True), PATH)
        assert names() == []


# ---- gone on from ---------------------------------------------------------------------------------------------------


async def test_a_conversation_goes_on_at_another_gateway():
    async with gateway("gw-a") as one, gateway("gw-b") as two:
        first = await ask(one, asked("one", instructions="be brief"))
        second = await ask(two, asked("two", previous_response_id=first["id"], instructions="be kind"))
        assert second["previous_response_id"] == first["id"]
        answered = {"role": "assistant", "content": "t0 t1 t2 t3"}
        assert messages(two) == [
            {"role": "system", "content": "be kind"},
            {"role": "user", "content": "one"},
            answered,
            {"role": "user", "content": "two"},
        ], "instructions are of one response"
        await shown(one, first["id"], method="DELETE")
        await ask(one, asked("three", previous_response_id=second["id"]))
        assert [message["content"] for message in messages(one)] == [
            "one",
            "t0 t1 t2 t3",
            "two",
            "t0 t1 t2 t3",
            "three",
        ]


async def test_a_response_that_is_not_kept_goes_on_from_one_that_is():
    async with gateway() as bed:
        first = await ask(bed, asked("one"))
        second = await ask(bed, asked("two", previous_response_id=first["id"], store=False))
        assert len(messages(bed)) == 3 or len(messages(bed, 0)) == 3
        assert (await call(bed, second["id"])).status == 404


async def test_an_unknown_or_another_tenants_response_is_404_and_named():
    async with gateway() as bed:
        first = await ask(bed, asked())
        for name, key in ((NO_ONE, None), ("resp_", None), ("x\u0000|y", None), (first["id"], OTHER)):
            others = {} if key is None else {"key": key}
            refused = await bed.ask(asked(previous_response_id=name), PATH, **others)
            assert (refused.status, refused.error["param"]) == (404, "previous_response_id")
            for below, method in (("", "GET"), ("", "DELETE"), ("/cancel", "POST"), ("/input_items", "GET")):
                refused = await call(bed, name, below, method, **others)
                assert (refused.status, refused.error["param"]) == (404, "response_id")
        assert calls(bed) == 1
        wrong = await bed.ask(asked(previous_response_id=5), PATH)
        assert (wrong.status, wrong.error["param"]) == (400, "previous_response_id")


async def test_an_id_that_no_response_can_have_is_not_looked_for():
    name = "resp_" + "x" * 5_000
    async with gateway(url="redis://127.0.0.1:1/0", watched=False) as bed:
        answer = await bed.ask(asked(previous_response_id=name), PATH)
        assert (answer.status, answer.error["param"]) == (404, "previous_response_id")
        for below, method in (("", "GET"), ("", "DELETE"), ("/cancel", "POST"), ("/input_items", "GET")):
            answer = await call(bed, name, below, method)
            assert (answer.status, answer.error["param"]) == (404, "response_id")
            assert len(answer.body) < 500


async def test_a_tenant_over_its_quota_reads_nothing():
    async with gateway() as bed:
        first = await ask(bed, asked())
        found = bed.gateway.snapshot
        acme, other = found.tenants
        bed.gateway.configure(replace(found, tenants=(replace(acme, rpm=1), other)))
        await ask(bed, asked())
        before = bed.gateway.responses.counts["found"]
        assert (await bed.ask(asked(previous_response_id=first["id"]), PATH)).status == 429
        assert bed.gateway.responses.counts["found"] == before


# ---- input and deletion ---------------------------------------------------------------------------------------------


async def test_the_input_of_a_response_is_listed_in_pages():
    said = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}, {"role": "user", "content": "c"}]
    async with gateway() as bed:
        first = await ask(bed, asked(said))
        second = await ask(bed, asked("d", previous_response_id=first["id"]))
        found = await listed(bed, second["id"], "order=asc")
        texts = [item["content"][0]["text"] for item in found["data"]]
        assert (texts, found["has_more"]) == (["a", "b", "c", "t0 t1 t2 t3", "d"], False)
        assert len({item["id"] for item in found["data"]}) == 5
        assert found["data"][1]["content"][0]["type"] == "output_text"
        page = await listed(bed, second["id"], "limit=2")
        assert ([item["content"][0]["text"] for item in page["data"]], page["has_more"]) == (["d", "t0 t1 t2 t3"], True)
        rest = await listed(bed, second["id"], f"after={page['last_id']}")
        assert [item["content"][0]["text"] for item in rest["data"]] == ["c", "b", "a"]
        for query, field in (("limit=0", "limit"), ("order=up", "order"), ("after=x", "after"), ("before=x", "before")):
            answer = await bed.ask(b"", f"{PATH}/{second['id']}/input_items", method="GET", query=query)
            assert (answer.status, answer.error["param"]) == (400, field)


async def listed(bed, response, query):
    answer = await bed.ask(b"", f"{PATH}/{response}/input_items", method="GET", query=query)
    assert answer.status == 200, answer.body
    return json.loads(answer.body)


async def test_a_response_is_deleted_at_any_gateway():
    async with gateway("gw-a") as one, gateway("gw-b") as two:
        made = await ask(one, asked())
        assert await shown(two, made["id"], method="DELETE") == {
            "id": made["id"],
            "object": "response",
            "deleted": True,
        }
        assert (await call(one, made["id"])).status == 404
        assert names() == []
        assert (await call(one, made["id"], method="PUT")).status == 405


async def test_a_response_ends_with_the_retention():
    async with gateway(retention_s=1) as bed:
        made = await ask(bed, asked())
        await asyncio.sleep(1.1)
        assert (await call(bed, made["id"])).status == 404


async def test_a_shorter_retention_forgets_them():
    async with gateway(other=60) as bed:
        await ask(bed, asked())
        await ask(bed, asked(), key=OTHER)
        keeps(bed, 0, other=60)
        await until_on_loop(lambda: bed.gateway.steps.counts["forgotten"] == 1)
        assert all(name.startswith("answers:other") for name in names())


# ---- bounds and faults ----------------------------------------------------------------------------------------------


async def test_input_that_is_too_large_is_served_and_not_kept(monkeypatch):
    monkeypatch.setattr("api.openai.protocol.response_requests.MOST_KEPT_BYTES", 100)
    async with gateway() as bed:
        made = await ask(bed, asked("x" * 200))
        assert made["store"] is False
        for field in ("store", "background"):
            refused = await bed.ask(asked("x" * 200, **{field: True}), PATH)
            assert (refused.status, refused.error["param"]) == (400, "input")


async def test_an_answer_that_is_too_large_is_not_kept(monkeypatch):
    monkeypatch.setattr("api.openai.stored_responses.LARGEST_BYTES", 2600)
    async with gateway() as bed:
        bed.every(Script(tokens=600))
        made = await ask(bed, asked("x" * 300))
        assert made["store"] is False
        assert (await call(bed, made["id"])).status == 404
        assert bed.gateway.responses.counts["too_large"] == 1
        made = await ask(bed, asked("x" * 300, background=True))
        found = await ended(bed, made["id"])
        assert (found["status"], found["output"]) == ("failed", [])
        assert "bytes" in found["error"]["message"]


async def test_without_redis_responses_are_computed_and_not_kept():
    async with gateway(url=AWAY) as bed:
        answer = await bed.ask(asked(), PATH)
        made = json.loads(answer.body)
        assert (made["store"], made["status"], int(answer.headers["content-length"])) == (
            *(False, "completed"),
            len(answer.body),
        )
        *_, last = told(await bed.ask(asked(stream=True), PATH))
        assert (last["type"], last["response"]["store"]) == ("response.completed", False)
        assert last["response"]["output"][0]["content"][0]["text"].strip() == "t0 t1 t2 t3"
        assert bed.gateway.responses.counts["unwritten"] == 2
        for answer in (
            await call(bed, made["id"]),
            await bed.ask(asked(previous_response_id=made["id"]), PATH),
            await bed.ask(asked(background=True), PATH),
        ):
            assert (answer.status, answer.error["code"]) == (503, "responses_unavailable")
        await until_on_loop(lambda: bed.gateway.quotas.active("acme") == 0)
        assert bed.gateway.responses.open == {}


@pytest.mark.parametrize(
    "raw", [b"", b"{", b"[]", b'{"open":true}', b'{"open":false,"response":{},"input":[],"kept_at":"x"}']
)
async def test_what_cannot_be_read_is_not_there(raw):
    async with gateway() as bed:
        made = await ask(bed, asked())
        client = live._client(settings.REDIS_URL)
        (name,) = [name for name in names() if name.endswith(made["id"]) and "||" not in name]
        client.set(name, raw)
        assert (await call(bed, made["id"])).status == 404


class Hanging:
    """A Redis that takes commands and never answers."""

    async def run(self, dialogue):
        await asyncio.Event().wait()


async def test_answers_wait_for_a_redis_that_hangs_no_longer_than_for_steps(monkeypatch):
    monkeypatch.setattr("api.openai.stored_responses.RUN_S", 0.3)
    monkeypatch.setattr("api.openai.stored_responses.READ_S", 1.0)
    async with gateway() as bed:
        bed.gateway.steps.board = Hanging()
        began = asyncio.get_running_loop().time()
        made = await asyncio.gather(*(ask(bed, asked(f"hello {number}")) for number in range(80)))
        took_s = asyncio.get_running_loop().time() - began
        assert took_s < 10.0, "all at once, and not four after one another, which takes 20 s"
        assert {each["store"] for each in made} == {False}
        assert (await call(bed, made[0]["id"])).status == 503
        assert bed.gateway.steps.lane("acme").waiting == 0


async def test_a_long_conversation_is_held_in_memory_as_a_long_body_is():
    """A short request that goes on from it counts with all that it stands for, until its answer is out."""
    async with gateway() as bed:
        first = await ask(bed, asked("word " * 480))
        bed.every(Script(hang_after=0))
        long = bed.send(asked(previous_response_id=first["id"]), PATH)
        await until_on_loop(lambda: calls(bed) == 2)
        assert bed.gateway.quotas.body_bytes > 4_000
        await long.hang_up()
        await until_on_loop(lambda: bed.gateway.quotas.body_bytes == 0)


async def test_a_query_of_very_many_fields_is_refused():
    async with gateway() as bed:
        made = await ask(bed, asked())
        answer = await call(bed, made["id"], query="&".join(["limit=1"] * 17))
        assert (answer.status, answer.error["param"]) == (400, "query")


async def test_items_that_came_twice_or_without_a_usable_id_are_paged_through():
    async with gateway() as bed:
        item = {"type": "message", "role": "user", "content": "hello", "id": "same"}
        made = await ask(bed, asked([item, item, {**item, "id": None}]))
        listed, after = [], ""
        while True:
            page = await shown(bed, made["id"], "/input_items", query=f"limit=1&order=asc{after}")
            listed += [each["id"] for each in page["data"]]
            if not page["has_more"]:
                break
            after = f"&after={page['last_id']}"
        assert len(set(listed)) == len(listed) == 3


async def test_the_end_of_one_finds_room_among_many_small_answers(monkeypatch):
    """More of them must go than one look drops."""
    monkeypatch.setattr("workers.steps.MOST_BYTES", 1000)
    monkeypatch.setattr("workers.steps.AT_ONCE", 1)
    async with gateway() as bed:
        run = bed.gateway.steps.board.run
        opened = stored_responses.OPEN.ljust(100)
        assert await run(stored_responses.keep_response("acme", NO_ONE, opened, 60)) == "kept"
        for number in range(4):
            assert await run(stored_responses.keep_response("acme", f"resp_{number}", b"x" * 200, 60)) == "kept"
        assert await run(stored_responses.end_response("acme", NO_ONE, b"y" * 500, 60)) == "kept"
        assert await run(stored_responses.read_response("acme", NO_ONE)) == (b"y" * 500, False)
        assert await run(stored_responses.read_response("acme", "resp_3")) == (b"x" * 200, False), "no more than needed"


async def test_a_tenant_calls_on_stored_responses_at_a_bounded_rate(monkeypatch):
    """Whoever polls too often is told when to come again; requests, and other tenants, go on."""
    monkeypatch.setattr("api.openai.tenants.CALLS_A_MINUTE", 3)
    async with gateway(other=60) as bed:
        made = await ask(bed, asked())
        await shown(bed, made["id"])
        await shown(bed, made["id"], "/input_items")
        assert (await call(bed, made["id"], "/cancel", "POST")).status == 400
        for below, method in (("", "GET"), ("", "DELETE"), ("/cancel", "POST"), ("/input_items", "GET")):
            refused = await call(bed, made["id"], below, method)
            assert (refused.status, refused.error["code"]) == (429, "rate_limit_exceeded")
            assert 1 <= int(refused.headers["retry-after"]) <= 20
        assert (await call(bed, made["id"], key=OTHER)).status == 404
        await ask(bed, asked())


@pytest.mark.parametrize(
    ("raw", "code"),
    [
        (None, "response_deleted"),
        (b'{"response":{"status":"cancelled"}}', "response_cancelled"),
        (b'{"response":{"status":"failed"}}', "response_lost"),
        (b"{", "response_lost"),
        (b"[]", "response_lost"),
    ],
)
def test_a_gateway_says_what_ended_its_response_elsewhere(raw, code):
    assert ended_by(raw) == code
