"""Several forks of one step: found again by the ids of their client, and counted together before its KV is freed."""

from __future__ import annotations

import asyncio

import pytest
from django.conf import settings

from tests.api.openai.gateways import completion
from tests.api.openai.test_forks import branch, checkpoint, decided, end, fork, shown, step
from tests.api.openai.test_steps import gateway
from tests.api.openai.workflow_gateways import OTHER
from tests.waiting import until_on_loop
from workers import live

pytestmark = pytest.mark.db


@pytest.fixture(autouse=True)
def redis(redis_server):
    client = live._client(settings.REDIS_URL)
    client.flushdb()
    return client


def of_forks(redis):
    """What Redis has of forks, beside those of checkpoints."""
    kinds = (b"fork:", b"left:", b"asked:", b"of:", b"forks")
    return [key for key in redis.keys("answers:acme|*") if key.partition(b"|")[2].startswith(kinds)]


# ---- counted together -----------------------------------------------------------------------------------------------


async def test_the_last_branch_of_the_last_fork_of_a_step_frees_its_kv(redis):
    async with gateway("gw-a") as one, gateway("gw-b") as two:
        where, request_id = await checkpoint(one)
        first, second = shown(await fork(one))["branches"], shown(await fork(two))["branches"]
        freed = one.backend(where).freed, two.backend(where).freed
        for name in first:
            assert (await end(two, name)).status == 200
        assert freed == ([], [])
        assert (await one.ask(branch(second[0]))).status == 200
        assert decided(one.sink.records[-1])["reason"] == "from_checkpoint"
        for name in second:
            assert (await end(one, name)).status == 200
        assert freed == ([request_id], [])
        assert not of_forks(redis)


async def test_forks_of_other_steps_and_of_an_answer_before_do_not_count():
    """A step that is computed again has a checkpoint of its own, which an older fork does not go on from."""
    async with gateway() as bed:
        where, first = await checkpoint(bed)
        old = shown(await fork(bed, branches=1))["branches"]
        await bed.ask(b"", "/v1/workflows/w1/steps", method="DELETE")
        answer = await bed.ask(step())
        second, there = answer.headers["x-slackline-request-id"], answer.headers["x-slackline-instance"]
        await bed.ask(completion(metadata={"workflow_id": "w1", "step_key": "other"}, checkpoint=60))
        new = shown(await fork(bed, branches=1))["branches"]
        assert shown(await fork(bed, step="other"))["checkpoint"] == "held"
        await end(bed, new[0])
        assert bed.backend(there).freed == [second]
        await end(bed, old[0])
        assert first in bed.backend(where).freed


async def test_a_fork_whose_lease_is_over_does_not_count(redis):
    async with gateway() as bed:
        where, request_id = await checkpoint(bed)
        await fork(bed)
        (counted,) = redis.keys("answers:acme|of:*")
        (abandoned,) = redis.zrange(counted, 0, -1)
        redis.zadd(counted, {abandoned: 1.0})
        (name,) = shown(await fork(bed, branches=1))["branches"]
        assert (await end(bed, name)).status == 200
        assert bed.backend(where).freed == [request_id]


async def test_a_branch_that_is_used_keeps_its_fork_counted(redis):
    async with gateway() as bed:
        where, _ = await checkpoint(bed)
        used = shown(await fork(bed))["branches"]
        (counted,) = redis.keys("answers:acme|of:*")
        (name,) = redis.zrange(counted, 0, -1)
        redis.zadd(counted, {name: redis.zscore(counted, name) - 59.9})
        assert (await bed.ask(branch(used[0]))).status == 200
        await asyncio.sleep(0.2)
        (other,) = shown(await fork(bed, branches=1))["branches"]
        await end(bed, other)
        assert bed.backend(where).freed == []


async def test_a_fork_of_lost_kv_frees_nothing_of_another_one():
    async with gateway("gw-a") as one, gateway("gw-b") as two:
        where, request_id = await checkpoint(one)
        held = shown(await fork(one, branches=1))["branches"]
        two.backend(where).freed.append(request_id)
        lost = shown(await fork(two, branches=1))
        assert lost["checkpoint"] == "lost"
        await end(one, lost["branches"][0])
        assert one.backend(where).freed == []
        await end(one, held[0])
        assert one.backend(where).freed == [request_id]


# ---- asked for again ------------------------------------------------------------------------------------------------


async def test_a_fork_with_an_id_is_the_same_when_it_is_asked_for_again_at_any_gateway(redis):
    async with gateway("gw-a") as one, gateway("gw-b") as two:
        where, request_id = await checkpoint(one)
        first = await fork(one, fork_id="explore")
        told = shown(first)
        assert (first.status, told["id"], told["open"]) == (201, "explore", told["branches"])
        assert (await end(two, told["branches"][1])).status == 200
        (kept,) = redis.keys("answers:acme|left:*")
        redis.pexpire(kept, 900)
        again = await fork(two, fork_id="explore")
        assert again.status == 200
        assert shown(again) == told | {"open": [told["branches"][0], told["branches"][2]]}
        assert redis.pttl(kept) > 50_000, "its lease has begun again"
        assert two.backend(where).renewed[-1] == request_id
        assert (await end(one, told["branches"][1])).status == 404
        for name in (told["branches"][0], told["branches"][2]):
            assert (await end(one, name)).status == 200
        assert one.backend(where).freed == [request_id]
        assert not of_forks(redis)


async def test_two_clients_that_ask_for_the_same_fork_at_once_get_one():
    async with gateway("gw-a") as one, gateway("gw-b") as two:
        await checkpoint(one)
        answers = await asyncio.gather(*(fork(bed, fork_id="explore") for bed in (one, two) * 4))
        assert sorted(each.status for each in answers) == [200] * 7 + [201]
        assert len({tuple(shown(each)["branches"]) for each in answers}) == 1


async def test_a_fork_is_found_again_where_its_tenant_may_have_no_other(monkeypatch):
    monkeypatch.setattr("workers.forks.MOST_FORKS", 1)
    async with gateway() as bed:
        await checkpoint(bed)
        assert [(await fork(bed, fork_id="a")).status for _ in range(2)] == [201, 200]
        assert (await fork(bed, fork_id="b")).status == 429


async def test_a_fork_whose_kv_was_lost_says_so_when_it_is_asked_for_again(redis):
    async with gateway() as bed:
        where, request_id = await checkpoint(bed)
        told = shown(await fork(bed, fork_id="explore"))
        bed.backend(where).freed.append(request_id)
        for _ in range(2):
            again = await fork(bed, fork_id="explore")
            assert (again.status, shown(again)) == (200, told | {"checkpoint": "lost"})
        (kept,) = redis.keys("answers:acme|fork:*")
        assert not redis.get(kept).startswith(b"["), "no branch is bound to it any more"
        assert (await bed.ask(branch(told["branches"][0]))).status == 200
        assert decided(bed.sink.records[-1])["reason"] == "checkpoint_lost"


async def test_after_its_last_branch_the_same_id_forks_anew():
    async with gateway() as bed:
        await checkpoint(bed)
        told = shown(await fork(bed, fork_id="explore", branches=1))
        await end(bed, told["branches"][0])
        again = await fork(bed, fork_id="explore", branches=1)
        assert (again.status, shown(again)) == (201, told | {"checkpoint": "lost"})


async def test_without_an_id_each_call_forks():
    async with gateway() as bed:
        await checkpoint(bed)
        first, second = await fork(bed), await fork(bed)
        assert (first.status, second.status) == (201, 201)
        assert shown(first)["id"] != shown(second)["id"]
        assert not {*shown(first)["branches"]} & {*shown(second)["branches"]}
        again = await fork(bed, fork_id=shown(first)["id"])
        assert (again.status, shown(again)["branches"]) == (200, shown(first)["branches"]), "its id was told"


async def test_ids_are_of_a_workflow():
    async with gateway() as bed:
        await checkpoint(bed)
        await bed.ask(completion(metadata={"workflow_id": "w2", "step_key": "plan"}, checkpoint=60))
        first, second = await fork(bed, fork_id="x"), await fork(bed, "w2", fork_id="x")
        assert (first.status, second.status) == (201, 201)
        assert shown(first)["branches"] != shown(second)["branches"]


async def test_another_tenants_fork_is_not_found():
    async with gateway() as bed:
        await checkpoint(bed)
        told = shown(await fork(bed, fork_id="explore"))
        assert (await fork(bed, fork_id="explore", key=OTHER)).status == 404
        await bed.ask(step(), key=OTHER)
        theirs = await fork(bed, fork_id="explore", key=OTHER)
        assert theirs.status == 201
        for name in told["branches"]:
            await end(bed, name, key=OTHER)
        assert shown(await fork(bed, fork_id="explore"))["open"] == told["branches"]


async def test_a_fork_of_a_cancelled_workflow_is_not_found_again(redis):
    async with gateway() as bed:
        where, request_id = await checkpoint(bed, workflow_deadline=60)
        assert (await fork(bed, fork_id="explore")).status == 201
        await bed.ask(b"", "/v1/workflows/w1/cancel")
        await until_on_loop(lambda: request_id in bed.backend(where).freed)
        assert (await fork(bed, fork_id="explore")).status == 404


# ---- refused --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("given", ["", "f" * 121, 5, True, [], {}, "a\0b"])
async def test_bad_ids_name_their_field(given):
    async with gateway() as bed:
        await checkpoint(bed)
        answer = await fork(bed, fork_id=given)
        assert (answer.status, answer.error["param"]) == (400, "fork_id")
        assert "fork_id" in answer.error["message"]


@pytest.mark.parametrize("given", [None, "f" * 120, "plan/ü-0:|x"])
async def test_other_ids_are_taken(given):
    async with gateway() as bed:
        await checkpoint(bed)
        told = shown(await fork(bed, fork_id=given, branches=64))
        assert given is None or told["id"] == given
        assert (await bed.ask(branch(told["branches"][63]))).status == 200
        assert decided(bed.sink.records[-1])["reason"] == "from_checkpoint"
        assert (await end(bed, told["branches"][63])).status == 200


async def test_an_id_of_a_fork_of_another_step_or_size_is_refused():
    async with gateway("gw-a") as one, gateway("gw-b") as two:
        await checkpoint(one)
        await one.ask(completion(metadata={"workflow_id": "w1", "step_key": "other"}, checkpoint=60))
        told = shown(await fork(one, fork_id="explore"))
        for body, field in (
            ({"step": "other"}, "fork_id"),
            ({"step": "none"}, "fork_id"),
            ({"branches": 4}, "branches"),
        ):
            answer = await fork(two, fork_id="explore", **body)
            assert (answer.status, answer.error["code"], answer.error["param"]) == (409, "fork_exists", field)
            assert answer.error["message"].startswith(f"{field}: ")
            assert answer.headers["x-should-retry"] == "false"
        assert shown(await fork(two, fork_id="explore")) == told
