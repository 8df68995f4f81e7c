"""Background responses that are streamed: told to whoever asks, at any gateway, from any event on, and never held up by
a reader."""

from __future__ import annotations

import asyncio
import json
from contextlib import contextmanager
from dataclasses import replace

import pytest
from django.conf import settings

from api.openai.response_events import Unpacked
from tests.api.openai.gateways import KEY, Client, key_config
from tests.api.openai.protocol.responses import told
from tests.api.openai.response_gateways import PATH, ask, asked, call, ended, gateway, shown
from tests.api.openai.test_steps import keeps, names
from tests.api.openai.workflow_gateways import OTHER
from tests.waiting import until_on_loop
from workers import live, stored_responses
from workers.backends.fake import Script

pytestmark = pytest.mark.db
SLOW = Script(tokens=30, token_delay_s=0.02)
HANGS = Script(tokens=9, hang_after=5)


@pytest.fixture(autouse=True)
def empty(redis_server):
    live._client(settings.REDIS_URL).flushdb()


@pytest.fixture(autouse=True)
def often(monkeypatch):
    monkeypatch.setattr("api.openai.stored_responses.RENEW_S", 0.05)
    monkeypatch.setattr("api.openai.response_events.FLUSH_S", 0.02)
    monkeypatch.setattr("api.openai.response_readers.LOOK_S", 0.02)


@pytest.fixture
async def one(empty):
    async with gateway("gw-a") as bed:
        yield bed


@pytest.fixture
async def two(empty):
    """Beside `one`, on the same Redis."""
    async with gateway("gw-b") as bed:
        yield bed


def begin(bed, **fields):
    """A client that begins one and reads its events."""
    return bed.send(asked(background=True, stream=True, **fields), PATH)


def events(answer):
    """Those that have come whole."""
    whole = answer.body.decode().rpartition("\n\n")[0]
    return [json.loads(event.partition("\ndata: ")[2]) for event in whole.split("\n\n") if event]


async def first(client, count=1):
    await until_on_loop(lambda: len(events(client.answer)) >= count)
    return events(client.answer)


async def id_of(client):
    return (await first(client))[0]["response"]["id"]


def read(bed, response, after=None, key=KEY):
    query = "stream=true" if after is None else f"stream=true&starting_after={after}"
    return bed.send(b"", f"{PATH}/{response}", key, "GET", query)


async def followed(one, two):
    """One that was begun at a gateway, with its client, its id and a reader of it at another gateway."""
    client = begin(one)
    response = await id_of(client)
    return client, response, read(two, response)


async def read_all(bed, response, after=None):
    answer = await read(bed, response, after).done()
    assert answer.status == 200, answer.body
    return events(answer)


def text(events):
    return "".join(event["delta"] for event in events if event["type"] == "response.output_text.delta")


def expected(tokens):
    return "".join(f"t{number} " for number in range(tokens))


# ---- told -----------------------------------------------------------------------------------------------------------


async def test_one_is_streamed_to_its_client_and_stored(one, two):
    answer = await begin(one).done()
    assert (answer.status, answer.headers["content-type"]) == (200, "text/event-stream; charset=utf-8")
    found = told(answer)
    assert [event["type"] for event in found[:3]] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
    ]
    last = found[-1]
    assert (last["type"], text(found)) == ("response.completed", expected(4))
    assert (last["response"]["background"], last["response"]["store"]) == (True, True)
    assert answer.headers["x-slackline-request-id"] == last["response"]["id"].replace("resp_", "req-")
    assert await shown(two, last["response"]["id"]) == last["response"]
    assert one.gateway.responses.logs == one.gateway.responses.open == {}
    await until_on_loop(lambda: one.sink.records)
    assert one.sink.records[0].outcome == "ok"
    assert one.gateway.quotas.active("acme") == one.gateway.quotas.body_bytes == 0


async def test_its_client_has_the_id_before_anything_is_computed(one):
    one.every(Script(hang_after=0))
    client = begin(one)
    created, in_progress = await first(client, 2)
    assert (created["response"]["status"], in_progress["type"]) == ("in_progress", "response.in_progress")
    await client.hang_up()
    assert (await shown(one, created["response"]["id"]))["status"] == "in_progress"
    await shown(one, created["response"]["id"], "/cancel", "POST")


@pytest.mark.parametrize("where", ["same", "other"])
async def test_a_client_whose_connection_broke_goes_on_where_it_was(one, two, where):
    one.every(SLOW)
    client = begin(one)
    response = await id_of(client)
    await first(client, 8)
    await client.hang_up()
    before = events(client.answer)
    after = await read_all(one if where == "same" else two, response, before[-1]["sequence_number"])
    together = before + after
    assert [event["sequence_number"] for event in together] == list(range(len(together)))
    assert (text(together), together[-1]["type"]) == (expected(30), "response.completed")
    assert one.sink.records[0].outcome == "ok"


@pytest.mark.parametrize("where", ["same", "other"])
async def test_one_is_read_again_after_its_end(one, two, where):
    whole = told(await begin(one).done())
    bed, response = one if where == "same" else two, whole[0]["response"]["id"]
    assert await read_all(bed, response) == whole
    for after in (0, 5, len(whole) - 2):
        assert await read_all(bed, response, after) == whole[after + 1 :]
    assert await read_all(bed, response, len(whole) - 1) == [], "it has had all"
    beyond = await read(bed, response, len(whole)).done()
    assert (beyond.status, beyond.error["param"]) == (400, "starting_after")


async def test_all_readers_are_told_the_same_at_every_gateway(one, two):
    one.every(SLOW)
    client = begin(one)
    response = await id_of(client)
    others = [read(bed, response) for bed in (one, one, two, two)]
    found = [told(await each.done()) for each in (client, *others)]
    assert all(each == found[0] for each in found)
    assert text(found[0]) == expected(30)
    assert one.gateway.readers._all == two.gateway.readers._all == set()


async def test_readers_at_another_gateway_hear_of_it_while_it_is_computed(one, two):
    one.every(HANGS)
    _, response, reader = await followed(one, two)
    await until_on_loop(lambda: text(events(reader.answer)) == expected(5))
    assert not reader.answer.ended.is_set()
    await reader.hang_up()
    assert (await shown(two, response))["status"] == "in_progress", "a reader that goes ends nothing"
    await shown(two, response, "/cancel", "POST")


async def test_calls_of_functions_and_steps_that_are_stored_are_streamed_too(one, two):
    """What is replayed is an answer like any other."""
    step = {"metadata": {"workflow_id": "w1", "step_key": "s1"}}
    await begin(one, **step).done()
    await until_on_loop(lambda: one.gateway.steps.counts["kept"] == 1)
    again = told(await begin(two, **step).done())
    assert text(again) == expected(4)
    assert await read_all(one, again[0]["response"]["id"]) == again


async def test_equal_ones_share_a_call_and_have_events_of_their_own(one):
    one.every(SLOW)
    clients = [begin(one, temperature=0, share_call=True) for _ in range(2)]
    found = [told(await each.done()) for each in clients]
    assert {text(each) for each in found} == {expected(30)}
    assert found[0][0]["response"]["id"] != found[1][0]["response"]["id"]
    assert sum(len(one.backend(name).calls) for name in ("e1", "e2")) == 1


# ---- refused --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("after", ["x", "-1", "1.5", "", "9" * 40, "٣"])
async def test_a_bad_starting_after_is_named(one, after):
    response = told(await begin(one).done())[0]["response"]["id"]
    refused = await read(one, response, after).done()
    assert (refused.status, refused.error["param"]) == (400, "starting_after")


@pytest.mark.parametrize(
    ("query", "field"),
    [("stream=yes", "stream"), ("stream=", "stream"), ("starting_after=1", "starting_after"), ("before=1", "before")],
)
async def test_a_bad_query_is_named(one, query, field):
    made = await ask(one, asked())
    refused = await call(one, made["id"], query=query)
    assert (refused.status, refused.error["param"]) == (400, field)
    assert (await call(one, made["id"], query="stream=false&include_obfuscation=false")).status == 200


async def test_only_one_that_is_streamed_in_the_background_has_events(one):
    for fields in ({}, {"background": True}):
        made = await ask(one, asked(**fields))
        await ended(one, made["id"])
        refused = await read(one, made["id"]).done()
        assert (refused.status, refused.error["param"]) == (400, "stream")


async def test_another_tenants_and_unknown_ones_do_not_exist(one):
    response = told(await begin(one).done())[0]["response"]["id"]
    for name, key in ((response, OTHER), ("resp_" + "0" * 24, KEY)):
        refused = await read(one, name, 0, key).done()
        assert (refused.status, refused.error["code"]) == (404, "not_found")


async def test_a_tenant_has_so_many_readers_at_once(one, monkeypatch):
    monkeypatch.setattr("api.openai.response_readers.MOST_READERS", 1)
    one.every(HANGS)
    response = await id_of(begin(one))
    reader = read(one, response)
    await first(reader)
    refused = await read(one, response).done()
    assert (refused.status, refused.error["param"]) == (429, "stream")
    await reader.hang_up()
    reader = read(one, response)
    await first(reader)
    await shown(one, response, "/cancel", "POST")
    await reader.done()


# ---- ended ----------------------------------------------------------------------------------------------------------


async def test_one_that_its_engine_refuses_has_failed_for_all_readers(one, two):
    one.every(Script(refuse_status=400))
    found = told(await begin(one).done())
    assert [event["type"] for event in found] == [
        "response.created",
        "response.in_progress",
        "response.failed",
        "error",
    ]
    assert found[2]["response"]["error"]["message"] == "scripted refusal"
    assert await read_all(two, found[0]["response"]["id"]) == found


async def test_one_that_is_cut_off_keeps_what_it_said(one, two):
    one.every(Script(cut_after=2))
    found = told(await begin(one).done())
    failed = found[-2]
    assert (failed["type"], found[-1]["type"], found[-1]["code"]) == ("response.failed", "error", "engine_failed")
    assert failed["response"]["output"][0]["content"][0]["text"] == expected(2)
    assert await shown(two, failed["response"]["id"]) == failed["response"]
    again = await read_all(two, failed["response"]["id"], len(found) - 1)
    assert [event["type"] for event in again] == ["response.failed", "error"], "told again: it may have been missed"


@pytest.mark.parametrize("how", ["cancel", "delete"])
async def test_readers_hear_that_one_was_ended_elsewhere(one, two, how):
    one.every(HANGS)
    client, response, reader = await followed(one, two)
    await first(reader, 3)
    if how == "cancel":
        assert (await shown(two, response, "/cancel", "POST"))["status"] == "cancelled"
    else:
        await shown(two, response, method="DELETE")
    for each in (client, reader):
        *_, last = events(await each.done())
        assert (last["type"], last["code"]) == ("error", {"cancel": "cancelled", "delete": "not_found"}[how])
    if how == "cancel":
        *_, failed, _ = events(client.answer)
        assert (failed["type"], failed["response"]["status"]) == ("response.failed", "cancelled")
        assert text(await read_all(two, response)) == expected(5)
    else:
        assert [name for name in names() if not name.endswith("|lease")] == []
        assert (await read(two, response).done()).status == 404


async def test_a_gateway_that_stops_ends_its_own_and_sends_other_readers_elsewhere(one, two):
    one.every(HANGS)
    client, _, reader = await followed(one, two)
    before = await first(reader, 4)
    two.gateway.closing = True
    last = events(await reader.done())[-1]
    assert (last["type"], last["code"]) == ("error", "shutting_down")
    assert last["sequence_number"] == events(reader.answer)[-2]["sequence_number"] >= before[-1]["sequence_number"]
    one.gateway.closing = True
    assert not client.answer.ended.is_set()
    one.gateway.runtime.give_up()
    *_, failed, error = events(await client.done())
    assert (failed["type"], error["code"]) == ("response.failed", "shutting_down")


async def test_a_revoked_key_reads_no_further(one, two):
    one.every(HANGS)
    _, response, reader = await followed(one, two)
    await first(reader, 3)
    found = two.gateway.snapshot
    others = tuple(each for each in found.keys if each.tenant != "acme")
    two.gateway.configure(replace(found, keys=(*others, key_config("sk-new", id=9)), version=found.version + 1))
    last = events(await reader.done())[-1]
    assert (last["type"], last["code"]) == ("error", "invalid_api_key")
    await shown(one, response, "/cancel", "POST")


async def test_readers_of_one_whose_gateway_has_died_hear_that_it_failed(monkeypatch):
    monkeypatch.setattr(stored_responses, "LEASE_S", 0.3)
    async with gateway("gw-b") as two, gateway("gw-a", watched=False) as one:  # it renews no lease: as good as dead
        one.every(HANGS)
        response = await id_of(begin(one))
        reader = read(two, response)
        *said, failed, error = told(await reader.done())
        assert (text(said), failed["type"], error["code"]) == (expected(5), "response.failed", "server_error")
        # A client may have had events that were not kept any more when the gateway died.
        ahead = await read_all(two, response, 50)
        assert [(each["type"], each["sequence_number"]) for each in ahead] == [("response.failed", 51), ("error", 52)]
        one.gateway.runtime.give_up()
        await one.gateway.runtime.drain(2)


# ---- bounds ---------------------------------------------------------------------------------------------------------


class SlowClient(Client):
    """Takes nothing more once it has the first events, until `goes`."""

    def __init__(self, *told):
        self.goes = asyncio.Event()
        super().__init__(*told)

    async def _send(self, message):
        await super()._send(message)
        if len(events(self.answer)) >= 3:
            await self.goes.wait()


def slow(bed, body, path, method="POST", query=""):
    return SlowClient(
        bed.app, path, json.dumps(body).encode(), [(b"authorization", f"Bearer {KEY}".encode())], method, query
    )


async def test_a_reader_slower_than_the_engine_holds_up_nobody_and_takes_no_memory(one, monkeypatch):
    monkeypatch.setattr("api.openai.response_events.TAIL_BYTES", 2_000)
    monkeypatch.setattr("api.openai.response_events.READ_BYTES", 1_000)
    one.every(Script(tokens=400, token_delay_s=0.001))
    client = slow(one, asked(background=True, stream=True), PATH)
    response = await id_of(client)
    reader, late = read(one, response), slow(one, {}, f"{PATH}/{response}", "GET", "stream=true")
    log = next(iter(one.gateway.responses.logs.values()))
    most = 0
    while not reader.answer.ended.is_set():
        most = max(most, log._bytes)
        await asyncio.sleep(0.005)
    assert (text(told(await reader.done())), most < 30_000) == (expected(400), True), most
    assert (await shown(one, response))["status"] == "completed"
    assert len(events(client.answer)) < 100
    for each in (client, late):
        each.goes.set()
        assert text(told(await each.done())) == expected(400)


async def test_readers_of_one_tenant_unpack_one_after_the_other(one, monkeypatch):
    """Many that read long answers at once must not keep the loop from others."""
    passes, unpacked, after = [0], [], Unpacked.after
    monkeypatch.setattr("api.openai.response_events.READ_BYTES", 1_000)
    monkeypatch.setattr(Unpacked, "after", lambda self, number: (unpacked.append(passes[0]), after(self, number))[1])

    async def count():
        while True:
            passes[0] += 1
            await asyncio.sleep(0)

    one.every(Script(tokens=50))
    whole = told(await begin(one).done())
    counting = asyncio.create_task(count())
    found = await asyncio.gather(*(read_all(one, whole[0]["response"]["id"]) for _ in range(10)))
    counting.cancel()
    assert all(each == whole for each in found)
    assert len(unpacked) == len(set(unpacked)) > 100


async def test_events_that_take_too_much_are_dropped_and_that_is_said(one, two, monkeypatch):
    monkeypatch.setattr(stored_responses, "EVENTS_BYTES", 1_000)
    one.every(Script(tokens=200, token_delay_s=0.005))
    client, response, reader = await followed(one, two)
    found = told(await client.done())
    assert (text(found), found[-1]["type"]) == (expected(200), "response.completed")
    last = events(await reader.done())[-1]
    assert (last["type"], last["code"]) == ("error", "events_dropped")
    for bed in (one, two):
        refused = await read(bed, response, 3).done()
        assert (refused.status, refused.error["code"], refused.error["param"]) == (410, "events_dropped", "stream")
    assert await read_all(two, response, len(found) - 2) == found[-1:], "how it ended is stored with it"
    assert (await shown(two, response)) == found[-1]["response"]
    assert one.gateway.responses.counts["events_dropped"] == 1


async def test_events_that_made_room_for_others_are_said_to_be_gone(one, monkeypatch):
    response = told(await begin(one).done())[0]["response"]["id"]
    monkeypatch.setattr("workers.steps.MOST_STEPS", 2)
    await ask(one, asked())
    refused = await read(one, response).done()
    assert (refused.status, refused.error["code"]) in {(410, "events_dropped"), (404, "not_found")}


async def test_events_end_with_their_response_and_are_counted_with_what_the_tenant_keeps(monkeypatch):
    async with gateway(retention_s=1) as bed:
        bed.every(Script(first_delay_s=1.5))
        response = told(await begin(bed).done())[0]["response"]["id"]
        client = live._client(settings.REDIS_URL)
        kept = [name for name in names() if response in name and "||" not in name and not name.endswith("|lease")]
        assert len(kept) == 2
        assert int(client.get("answers:acme|bytes")) == sum(client.strlen(name) for name in kept)
        assert len(await read_all(bed, response)) > 3
        keeps(bed, 0)
        await until_on_loop(lambda: bed.gateway.steps.counts["forgotten"] == 2)


class Away:
    """A Redis that has gone away."""

    async def run(self, dialogue):
        raise live.LiveUnavailable("away")


@contextmanager
def redis_away(*beds):
    boards = [bed.gateway.steps.board for bed in beds]
    for bed in beds:
        bed.gateway.steps.board = Away()
    try:
        yield
    finally:
        for bed, board in zip(beds, boards, strict=True):
            bed.gateway.steps.board = board


async def test_while_redis_is_away_the_client_is_told_and_others_hear_of_it(one, two, monkeypatch):
    monkeypatch.setattr("api.openai.response_readers.PATIENCE_S", 0.2)
    monkeypatch.setattr("api.openai.response_events.UNWRITTEN_BYTES", 5_000)
    one.every(Script(tokens=60, token_delay_s=0.01))
    client, response, reader = await followed(one, two)
    await first(reader, 5)
    with redis_away(one, two):
        last = events(await reader.done())[-1]
        assert (last["type"], last["code"]) == ("error", "responses_unavailable")
        await until_on_loop(lambda: text(events(client.answer)) == expected(60))
    assert told(await client.done())[-1]["type"] == "response.completed"
    assert (await read(two, response).done()).error["code"] == "events_dropped"
    with redis_away(two):
        refused = await begin(two).done()
    assert (refused.status, refused.error["code"]) == (503, "responses_unavailable")


async def test_a_short_absence_of_redis_loses_no_event(one, two):
    one.every(Script(tokens=40, token_delay_s=0.01))
    client, _, reader = await followed(one, two)
    await first(reader, 5)
    with redis_away(one, two):
        await asyncio.sleep(0.15)
    assert told(await reader.done()) == told(await client.done())
