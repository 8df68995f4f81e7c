"""Background responses: computed without their client, ended at any gateway, and held by a lease meanwhile."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest
from django.conf import settings

from tests.api.openai.response_gateways import PATH, ask, asked, call, ended, gateway, shown
from tests.api.openai.test_steps import calls, names
from tests.waiting import until_on_loop
from workers import live, stored_responses
from workers.backends.fake import Script

pytestmark = pytest.mark.db


@pytest.fixture(autouse=True)
def empty(redis_server):
    live._client(settings.REDIS_URL).flushdb()


@pytest.fixture(autouse=True)
def often(monkeypatch):
    monkeypatch.setattr("api.openai.stored_responses.RENEW_S", 0.05)


async def test_a_background_response_is_computed_without_its_client():
    async with gateway("gw-a") as one, gateway("gw-b") as two:
        one.every(Script(first_delay_s=0.2))
        made = await ask(one, asked(background=True))
        assert (made["status"], made["background"], made["output"], made["store"]) == ("in_progress", True, [], True)
        assert (await shown(two, made["id"]))["status"] == "in_progress"
        refused = await two.ask(asked(previous_response_id=made["id"]), PATH)
        assert (refused.status, refused.error["param"]) == (400, "previous_response_id")
        found = await ended(two, made["id"])
        assert (found["status"], found["output"][0]["content"][0]["text"]) == ("completed", "t0 t1 t2 t3")
        assert one.gateway.responses.open == {}
        (record,) = one.sink.records
        assert record.outcome == "ok"
        await ask(two, asked("more", previous_response_id=made["id"]))
        assert one.gateway.quotas.active("acme") == 0


async def test_one_that_its_engine_refuses_has_failed():
    async with gateway() as bed:
        bed.every(Script(refuse_status=400))
        made = await ask(bed, asked(background=True))
        found = await ended(bed, made["id"])
        assert found["status"] == "failed"
        assert found["error"]["message"]


@pytest.mark.parametrize("how", ["cancel", "delete"])
async def test_one_is_ended_at_another_gateway(how):
    async with gateway("gw-a") as one, gateway("gw-b") as two:
        one.every(Script(hang_after=0))
        made = await ask(one, asked(background=True))
        if how == "cancel":
            told = await shown(two, made["id"], "/cancel", "POST")
            assert told["status"] == "cancelled"
        else:
            await shown(two, made["id"], method="DELETE")
        await until_on_loop(lambda: one.sink.records)
        (record,) = one.sink.records
        assert (record.outcome, one.gateway.responses.open) == ("cancelled", {})
        assert record.error_code == {"cancel": "response_cancelled", "delete": "response_deleted"}[how]
        if how == "cancel":
            assert (await shown(one, made["id"]))["status"] == "cancelled"
            assert (await shown(one, made["id"], "/cancel", "POST"))["status"] == "cancelled"
        else:
            assert [name for name in names() if not name.endswith("|lease")] == [], "a lease ends by itself"


async def test_one_that_is_not_stored_yet_is_not_taken_for_a_deleted_one(monkeypatch):
    async with gateway(watched=False) as bed:
        responses, run = bed.gateway.responses, bed.gateway.responses._run

        async def slowly(*what):
            for each in list(responses.open.items()):
                await responses._renew(*each)
            return await run(*what)

        bed.every(Script(hang_after=0))
        monkeypatch.setattr(responses, "_run", slowly)
        made = await ask(bed, asked(background=True))
        assert [name for _, name in responses.open] == [made["id"]]
        assert (await shown(bed, made["id"]))["status"] == "in_progress"
        assert (await shown(bed, made["id"], "/cancel", "POST"))["status"] == "cancelled"


async def test_only_one_in_the_background_can_be_cancelled_and_what_has_ended_stays():
    async with gateway() as bed:
        made = await ask(bed, asked())
        refused = await call(bed, made["id"], "/cancel", "POST")
        assert (refused.status, refused.error["param"]) == (400, "response_id")
        made = await ask(bed, asked(background=True))
        await ended(bed, made["id"])
        assert (await shown(bed, made["id"], "/cancel", "POST"))["status"] == "completed"


async def test_one_whose_gateway_has_died_has_failed_after_its_lease(monkeypatch):
    monkeypatch.setattr(stored_responses, "LEASE_S", 0.3)
    async with gateway("gw-b") as two:
        async with gateway("gw-a", watched=False) as one:  # it renews no lease: as good as dead
            one.every(Script(hang_after=0))
            made = await ask(one, asked(background=True))
            assert (await shown(two, made["id"]))["status"] == "in_progress"
            await asyncio.sleep(0.4)
            found = await shown(two, made["id"])
            assert (found["status"], found["error"]["code"]) == ("failed", "server_error")
            one.gateway.runtime.give_up()
            await one.gateway.runtime.drain(2)
        assert await shown(two, made["id"]) == found, "what was told once stays"


async def test_one_holds_its_lease_while_it_is_computed(monkeypatch):
    monkeypatch.setattr(stored_responses, "LEASE_S", 0.3)
    async with gateway("gw-a") as one, gateway("gw-b") as two:
        one.every(Script(first_delay_s=1.0))
        made = await ask(one, asked(background=True))
        await asyncio.sleep(0.6)
        assert (await shown(two, made["id"]))["status"] == "in_progress"
        assert (await ended(two, made["id"]))["status"] == "completed"


async def test_a_gateway_that_stops_tells_that_it_failed():
    async with gateway("gw-a") as one, gateway("gw-b") as two:
        one.every(Script(hang_after=0))
        made = await ask(one, asked(background=True))
        one.gateway.runtime.give_up()
        found = await ended(two, made["id"])
        assert (found["status"], found["error"]["code"]) == ("failed", "shutting_down")


@pytest.mark.parametrize("stream", [False, True])
async def test_what_does_not_go_with_background_is_refused(stream):
    async with gateway() as bed:
        refused = await bed.ask(asked(background=True, store=False, stream=stream), PATH)
        assert (refused.status, refused.error["param"]) == (400, "background")


async def test_one_counts_against_its_tenants_concurrency():
    async with gateway() as bed:
        found = bed.gateway.snapshot
        acme, other = found.tenants
        bed.gateway.configure(replace(found, tenants=(replace(acme, max_concurrency=1), other)))
        bed.every(Script(hang_after=0))
        made = await ask(bed, asked(background=True))
        assert (await bed.ask(asked(background=True), PATH)).status == 429
        await shown(bed, made["id"], "/cancel", "POST")
        await until_on_loop(lambda: bed.gateway.quotas.active("acme") == 0)


async def test_one_that_is_computed_neither_expires_nor_makes_room_for_others(monkeypatch):
    """Its retention is shorter than it takes, and what others keep meanwhile fills all room."""
    monkeypatch.setattr("workers.steps.MOST_STEPS", 3)
    async with gateway(retention_s=1) as bed:
        bed.every(Script(hang_after=0))
        made = await ask(bed, asked(background=True))
        await until_on_loop(lambda: calls(bed) == 1)
        bed.every(Script())
        for _ in range(4):
            await asyncio.sleep(0.4)
            await ask(bed, asked())
        assert (await shown(bed, made["id"]))["status"] == "in_progress"
        assert (await shown(bed, made["id"], "/cancel", "POST"))["status"] == "cancelled"


async def test_what_a_background_response_repeats_must_leave_room_for_its_end(monkeypatch):
    """Its instructions are no input, but they are stored with it."""
    monkeypatch.setattr("api.openai.stored_responses.LARGEST_BYTES", 4000)
    async with gateway() as bed:
        refused = await bed.ask(asked(background=True, instructions="x" * 4000), PATH)
        assert (refused.status, refused.error["param"]) == (400, "background")
        assert (bed.gateway.responses.counts["too_large"], names()) == (1, [])
        await until_on_loop(lambda: bed.sink.records)
        assert (bed.sink.records[0].outcome, bed.sink.records[0].error_code) == ("cancelled", "response_unstored")
        await until_on_loop(lambda: bed.gateway.quotas.active("acme") == 0)
        assert (bed.gateway.responses.open, bed.gateway.quotas.body_bytes) == ({}, 0)
        assert (await ask(bed, asked(background=True)))["status"] == "in_progress"


@pytest.mark.parametrize("older_s", [0.0, 1e7])  # than the retention, which counts from its end
async def test_one_whose_lease_is_only_late_is_not_lost(monkeypatch, older_s):
    monkeypatch.setattr(stored_responses, "LEASE_S", 0.2)
    async with gateway("gw-b") as two, gateway("gw-a", watched=False) as one:
        one.every(Script(hang_after=0))
        made = await ask(one, asked(background=True))
        await asyncio.sleep(0.3)
        monkeypatch.setattr(stored_responses, "LEASE_S", 10.0)
        monkeypatch.setattr("api.openai.stored_responses.RENEW_S", 0.5)
        clock = two.gateway.responses._now
        monkeypatch.setattr(two.gateway.responses, "_now", lambda: clock() + older_s)
        looking = asyncio.create_task(shown(two, made["id"]))
        await asyncio.sleep(0.1)
        assert await one.gateway.steps.board.run(stored_responses.renew_response("acme", made["id"], 60))
        assert (await looking)["status"] == "in_progress"
        assert two.gateway.responses.counts["lost"] == 0
        await shown(two, made["id"], method="DELETE")
        one.gateway.runtime.give_up()
        await one.gateway.runtime.drain(2)


async def test_the_body_of_a_background_response_is_held_until_it_has_ended():
    async with gateway() as bed:
        bed.every(Script(hang_after=0))
        made = await ask(bed, asked("word " * 480, background=True))
        assert bed.gateway.quotas.body_bytes > 4_000
        await shown(bed, made["id"], "/cancel", "POST")
        await until_on_loop(lambda: bed.gateway.quotas.body_bytes == 0)


async def test_one_that_another_gateway_has_told_as_failed_ends_where_it_is_computed(monkeypatch):
    monkeypatch.setattr(stored_responses, "LEASE_S", 0.1)
    async with gateway("gw-b") as two, gateway("gw-a", watched=False) as one:
        one.every(Script(hang_after=0))
        made = await ask(one, asked(background=True))
        await asyncio.sleep(0.2)
        assert (await shown(two, made["id"]))["status"] == "failed"
        watching = asyncio.create_task(one.gateway.responses.watch())
        await until_on_loop(lambda: one.sink.records)
        watching.cancel()
        assert (one.sink.records[0].outcome, one.sink.records[0].error_code) == ("cancelled", "response_lost")
