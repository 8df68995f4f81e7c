"""Forks of a workflow at a step: through two gateways and a real Redis, from the checkpoint to its last branch."""

from __future__ import annotations

import asyncio
import json
import logging
from dataclasses import replace
from functools import partial

import pytest
from django.conf import settings

from tests.api.openai.gateways import completion
from tests.api.openai.test_steps import gateway
from tests.api.openai.workflow_gateways import OTHER
from tests.waiting import until_on_loop
from workers import forks, live
from workers.backends.base import EngineError
from workers.backends.fake import Script
from workers.live import LiveUnavailable
from workers.steps import name_of_step

pytestmark = pytest.mark.db
AWAY = "redis://127.0.0.1:1/0"
KINDS = ("at:", "steps:", "checkpoints", "fork:", "left:", "forks", "asked:", "of:")


@pytest.fixture(autouse=True)
def empty(redis_server):
    live._client(settings.REDIS_URL).flushdb()


def step(**fields):
    return completion(metadata={"workflow_id": "w1", "step_key": "plan"}, checkpoint=60, **fields)


def branch(name, **fields):
    return completion(**{"prompt": [1, 2, 3, 4, 5, 6, 7, 8, 9], "branch": name, **fields})


def fork(bed, name="w1", **fields):
    key = fields.pop("key", None)
    body = {"step": "plan", "branches": 3, **fields}
    return bed.ask(body, f"/v1/workflows/{name}/fork", **({"key": key} if key else {}))


def end(bed, name, **more):
    return bed.ask(b"", f"/v1/workflows/w1/branches/{name}", method="DELETE", **more)


def shown(answer):
    return json.loads(answer.body)


def decided(record):
    return next(each for each in record.decisions if each["kind"] == "fork")


async def checkpoint(bed, **fields):
    """The instance at which a step has left one, and its request."""
    answer = await bed.ask(step(**fields))
    assert answer.status == 200
    await until_on_loop(lambda: live._client(settings.REDIS_URL).keys("answers:acme|at:*"))
    return answer.headers["x-slackline-instance"], answer.headers["x-slackline-request-id"]


# ---- forked ---------------------------------------------------------------------------------------------------------


async def test_a_fork_that_is_asked_for_before_the_checkpoint_is_told_finds_it():
    async with gateway() as bed:
        asked = asyncio.ensure_future(fork(bed))
        await asyncio.sleep(0.1)
        await bed.ask(step())
        answer = await asked
        assert (answer.status, shown(answer)["checkpoint"]) == (201, "held")


class Late:
    """Redis through a gateway's client, which tells checkpoints late: the first `away` times it cannot."""

    def __init__(self, board, late_s=0.0, away=0):
        self.board, self.late_s, self.away = board, late_s, away

    async def run(self, dialogue):
        if dialogue.__name__ == "keep_checkpoint":
            await asyncio.sleep(self.late_s)
            if self.away:
                self.away -= 1
                raise LiveUnavailable("away")
        return await self.board.run(dialogue)


@pytest.mark.parametrize("told", [{"late_s": 0.6}, {"away": 2}], ids=["late", "again"])
async def test_a_fork_waits_for_the_checkpoint_that_its_gateway_has_not_told_yet(monkeypatch, told):
    monkeypatch.setattr("api.openai.forks.AGAIN_S", 0.1)
    async with gateway() as bed:
        bed.gateway.forks.board = Late(bed.gateway.forks.board, **told)
        await bed.ask(step())
        answer = await fork(bed)
        assert (answer.status, shown(answer)["checkpoint"]) == (201, "held")


async def test_a_checkpoint_that_redis_does_not_take_can_be_asked_for_again(monkeypatch):
    """The step has one, so that no 404 is told."""
    monkeypatch.setattr("api.openai.forks.TOLD_S", 0.1)
    async with gateway() as bed:
        bed.gateway.forks.board = Late(bed.gateway.forks.board, late_s=0.5)
        await bed.ask(step())
        answer = await fork(bed)
        assert (answer.status, answer.error["code"]) == (503, "workflows_unavailable")
        await until_on_loop(lambda: live._client(settings.REDIS_URL).keys("answers:acme|at:*"))
        assert (await fork(bed)).status == 201


class Away:
    async def run(self, dialogue):
        dialogue.close()
        raise LiveUnavailable("away")


async def test_while_redis_is_away_the_log_gets_a_line_and_not_one_for_each_cancelled_workflow(caplog):
    caplog.set_level(logging.INFO)
    async with gateway() as bed:
        bed.gateway.forks.board = Away()
        for number in range(5):
            bed.gateway.forks.forget("acme", f"w{number}")
        await until_on_loop(lambda: "were not freed" in caplog.text)
        await asyncio.sleep(0.2)
    assert caplog.text.count("checkpoints of a cancelled workflow were not freed") == 1


async def test_a_checkpoint_of_a_cancelled_workflow_is_not_told_again(monkeypatch):
    monkeypatch.setattr("api.openai.forks.AGAIN_S", 0.1)
    async with gateway() as bed:
        bed.gateway.forks.board = late = Late(bed.gateway.forks.board, away=5)
        await bed.ask(step())
        await until_on_loop(lambda: late.away < 5)
        bed.gateway.forks.forget("acme", "w1")
        await asyncio.sleep(1.0)
        assert not live._client(settings.REDIS_URL).keys("answers:acme|at:*")


async def test_branches_go_where_the_checkpoint_is_at_any_gateway_and_the_last_one_frees_it():
    async with gateway("gw-a") as one, gateway("gw-b") as two:
        where, request_id = await checkpoint(one)
        assert one.backend(where).calls[0].checkpoint_s == 60
        forked = await fork(two)
        told = shown(forked)
        assert (forked.status, told["object"], told["checkpoint"], told["lease"]) == (201, "workflow.fork", "held", 60)
        assert len(set(told["branches"])) == 3
        assert two.backend(where).renewed == [request_id]
        for _ in range(2):
            answers = await asyncio.gather(*(two.ask(branch(name)) for name in told["branches"]))
            assert {answer.headers["x-slackline-instance"] for answer in answers} == {where}
        assert {call.branch_of for call in two.backend(where).calls} == {request_id}
        record = two.sink.records[-1]
        assert decided(record)["reason"] == "from_checkpoint"
        assert decided(record)["figures"]["tokens"] == 8
        for name in told["branches"][:2]:
            assert (await end(one, name)).status == 200
        assert one.backend(where).freed == []
        assert (await end(one, told["branches"][2])).status == 200
        assert one.backend(where).freed == [request_id]
        assert (await end(one, told["branches"][2])).status == 404
        await one.ask(branch(told["branches"][0]))
        assert decided(one.sink.records[-1])["reason"] == "checkpoint_lost"
        keys = live._client(settings.REDIS_URL).keys("answers:acme|*")
        assert not [key for key in keys if b"fork:" in key or b"left:" in key]


async def test_the_last_token_of_the_answer_has_no_kv_that_a_branch_could_go_on_from():
    async with gateway() as bed:
        await checkpoint(bed)
        used = bed.sink.records[-1]
        (name, *_) = shown(await fork(bed))["branches"]
        assert (await bed.ask(branch(name, prompt=list(range(1, 200))))).status == 200
        kept = used.prompt_tokens + used.output_tokens - 1
        assert decided(bed.sink.records[-1])["figures"]["tokens"] == kept


async def test_forks_and_branches_keep_the_step_as_long_as_its_kv():
    """Else a client that died could not fork again, while the engine still holds the KV for its branches."""
    async with gateway() as bed:
        await checkpoint(bed)
        redis = live._client(settings.REDIS_URL)
        (at,) = redis.keys("answers:acme|at:*")
        redis.pexpire(at, 900)
        names = shown(await fork(bed))["branches"]
        assert redis.pttl(at) > 50_000
        redis.pexpire(at, 900)
        await bed.ask(branch(names[0]))
        await until_on_loop(lambda: redis.pttl(at) > 50_000)


async def test_a_cancelled_workflow_frees_its_checkpoints_at_once():
    async with gateway("gw-a") as one, gateway("gw-b") as two:
        where, request_id = await checkpoint(one, workflow_deadline=60)
        other = await one.ask(completion(metadata={"workflow_id": "w2", "step_key": "plan"}, checkpoint=60))
        await until_on_loop(lambda: len(live._client(settings.REDIS_URL).keys("answers:acme|at:*")) == 2)
        names = shown(await fork(two))["branches"]
        assert (await two.ask(b"", "/v1/workflows/w1/cancel")).status == 200
        freed = one.backend(where).freed, two.backend(where).freed
        await until_on_loop(lambda: request_id in freed[0] + freed[1])
        assert other.headers["x-slackline-request-id"] not in freed[0] + freed[1]
        assert ((await fork(one)).status, (await fork(one, "w2")).status) == (404, 201)
        assert (await end(one, names[0])).status == 200


async def test_it_is_computed_elsewhere_where_that_costs_less():
    async with gateway() as bed:
        where, _ = await checkpoint(bed)
        names = shown(await fork(bed))["branches"]
        there = bed.gateway.scheduler.dispatcher.lanes["demo"].instances[where]
        there.waiting_new, there.waiting_squares = 90_000, 90_000**2
        answer = await bed.ask(branch(names[0]))
        figures = decided(bed.sink.records[-1])["figures"]
        assert decided(bed.sink.records[-1])["reason"] == "sooner_again"
        assert figures["again_s"] < figures["fork_s"]
        assert answer.headers["x-slackline-instance"] != where
        there.waiting_new = there.waiting_squares = 0
        await bed.ask(branch(names[0]))
        assert decided(bed.sink.records[-1])["reason"] == "from_checkpoint"


async def test_branches_that_wait_there_count_with_what_is_new_of_them():
    async with gateway() as bed:
        where, _ = await checkpoint(bed)
        names = shown(await fork(bed, branches=8))["branches"]
        bed.backend(where, Script(hang_after=0))
        waiting = []
        for name in names:
            waiting.append(bed.send(branch(name, stream=True)))
            await until_on_loop(lambda: bed.backend(where).running == len(waiting))
        for client in waiting:
            await client.hang_up()
        reasons = [decided(record)["reason"] for record in bed.sink.records[1:]]
        assert reasons == ["from_checkpoint"] * 8


def shared(name):
    return branch(name, share_call=True, temperature=0)


async def test_equal_requests_of_branches_share_a_call_where_the_checkpoint_is():
    async with gateway() as bed:
        where, request_id = await checkpoint(bed)
        names = shown(await fork(bed))["branches"]
        bed.every(Script(first_delay_s=0.2))
        answers = await asyncio.gather(*(bed.ask(shared(name)) for name in names))
        assert [answer.status for answer in answers] == [200] * 3
        assert len({answer.body for answer in answers}) == 1
        _, call = bed.backend(where).calls
        assert call.branch_of == request_id
        await until_on_loop(lambda: len(bed.sink.records) == 4)
        assert sorted(record.attempts for record in bed.sink.records[1:]) == [0, 0, 1]
        noted = [each["reason"] for record in bed.sink.records for each in record.decisions if each["kind"] == "fork"]
        assert noted == ["from_checkpoint"], "the others were placed nowhere"


async def test_a_call_that_branches_share_waits_for_the_checkpoint_when_another_one_joins_it():
    async with gateway() as bed:
        found = bed.gateway.snapshot
        one_slot = tuple(replace(each, max_num_seqs=1) for each in found.instances)
        bed.gateway.configure(replace(found, instances=one_slot, version=found.version + 1))
        where, request_id = await checkpoint(bed)
        names = shown(await fork(bed))["branches"]
        bed.backend(where, Script(hang_after=0))
        held = bed.send(branch(names[0], stream=True))
        await until_on_loop(lambda: bed.backend(where).running)
        equal = [bed.send(shared(name)) for name in names[1:]]
        await until_on_loop(lambda: bed.gateway.shared_calls.shared["acme"] == 1)
        bed.backend(where, Script())
        await held.hang_up()
        answers = [await each.done() for each in equal]
        assert {answer.headers["x-slackline-instance"] for answer in answers} == {where}
        assert [call.branch_of for call in bed.backend(where).calls] == ["", request_id, request_id]


async def test_an_engine_that_is_lost_takes_its_checkpoint_along():
    async with gateway() as bed:
        where, _ = await checkpoint(bed)
        names = shown(await fork(bed))["branches"]
        found = bed.gateway.snapshot
        left = tuple(each for each in found.instances if each.id != where)
        bed.gateway.configure(replace(found, instances=left, version=found.version + 1))
        answer = await bed.ask(branch(names[0]))
        assert (answer.status, decided(bed.sink.records[-1])["reason"]) == (200, "checkpoint_lost")
        again = shown(await fork(bed))
        assert again["checkpoint"] == "lost"
        assert (await end(bed, names[0])).status == 200


async def test_a_branch_is_tried_elsewhere_if_its_engine_fails():
    async with gateway() as bed:
        where, _ = await checkpoint(bed)
        names = shown(await fork(bed))["branches"]
        bed.backend(where, Script(unreachable=True))
        (other,) = {"e1", "e2"} - {where}
        bed.backend(other, Script(hang_after=0))
        client = bed.send(branch(names[0], stream=True))
        there = bed.gateway.scheduler.dispatcher.lanes["demo"].instances[other]
        await until_on_loop(lambda: there.waiting)
        assert there.waiting_new == 9, "all of its prompt is computed there"
        bed.backend(other, Script())
        await client.hang_up()
        await until_on_loop(lambda: len(bed.sink.records) == 2)
        assert bed.sink.records[-1].prompt_tokens == 9


async def test_a_checkpoint_that_the_engine_has_dropped_is_told_as_lost_and_no_branch_is_bound_to_it():
    async with gateway() as bed:
        where, request_id = await checkpoint(bed)
        bed.backend(where).freed.append(request_id)
        told = shown(await fork(bed))
        assert told["checkpoint"] == "lost"
        assert (await bed.ask(branch(told["branches"][0]))).status == 200
        assert decided(bed.sink.records[-1])["reason"] == "checkpoint_lost"
        assert [(await end(bed, name)).status for name in told["branches"]] == [200] * 3


async def test_after_the_first_branch_no_other_is_bound_to_a_checkpoint_that_was_dropped_meanwhile():
    """The engine evicted it, or was started again under its name."""
    async with gateway("gw-a") as one, gateway("gw-b") as two:
        where, request_id = await checkpoint(one)
        names = shown(await fork(one))["branches"]
        one.backend(where).freed.append(request_id)
        assert (await one.ask(branch(names[0]))).status == 200
        redis = live._client(settings.REDIS_URL)
        (kept,) = (key.decode() for key in redis.keys("answers:acme|fork:*"))
        await until_on_loop(lambda: not redis.get(kept).startswith(b"["))  # the lease alone is left
        redis.pexpire(kept.replace("|fork:", "|left:"), 900)
        assert (await two.ask(branch(names[1]))).status == 200
        assert decided(two.sink.records[-1])["reason"] == "checkpoint_lost"
        assert redis.pttl(kept.replace("|fork:", "|left:")) > 900, "a branch that is used stays open"
        assert [(await end(two, name)).status for name in names] == [200] * 3


async def test_an_engine_that_does_not_answer_keeps_its_branches(monkeypatch):
    async with gateway() as bed:
        where, _ = await checkpoint(bed)

        async def fails(request_id, lease_s):
            raise EngineError("no answer")

        monkeypatch.setattr(bed.backend(where), "renew_kv", fails)
        told = shown(await fork(bed))
        assert told["checkpoint"] == "lost"
        for name in told["branches"]:
            await bed.ask(branch(name))
            assert decided(bed.sink.records[-1])["reason"] == "from_checkpoint"


# ---- refused --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"step": ""}, "step"),
        ({"step": 5}, "step"),
        ({"step": "s" * 121}, "step"),
        ({"branches": 0}, "branches"),
        ({"branches": 65}, "branches"),
        ({"branches": None}, "branches"),
        ({"branches": "3"}, "branches"),
        ({"depth": 1}, "depth"),
    ],
)
async def test_bad_forks_name_their_field(body, field):
    async with gateway() as bed:
        answer = await fork(bed, **body)
        assert (answer.status, answer.error["param"]) == (400, field)


@pytest.mark.parametrize(
    ("body", "field"),
    [
        (completion(checkpoint=60), "checkpoint"),
        (step() | {"checkpoint": 0}, "checkpoint"),
        (step() | {"checkpoint": 4_000}, "checkpoint"),
        (step() | {"checkpoint": True}, "checkpoint"),
        (completion(branch=""), "branch"),
        (completion(branch=5), "branch"),
        (completion(branch="b" * 121), "branch"),
    ],
)
async def test_bad_requests_name_their_field(body, field):
    async with gateway() as bed:
        answer = await bed.ask(body)
        assert (answer.status, answer.error["param"]) == (400, field)


async def test_a_step_without_a_checkpoint_and_another_tenants_cannot_be_forked():
    async with gateway() as bed:
        await bed.ask(completion(metadata={"workflow_id": "w1", "step_key": "plan"}))
        assert ((await fork(bed)).status, (await fork(bed)).error["param"]) == (404, "step")
        await bed.ask(completion(metadata={"workflow_id": "w2", "step_key": "plan"}, checkpoint=60))
        await until_on_loop(lambda: live._client(settings.REDIS_URL).keys("answers:acme|at:*"))
        assert (await fork(bed, "w2")).status == 201
        assert (await fork(bed, "w2", key=OTHER)).status == 404
        assert (await fork(bed, "w2", key="sk-no")).status == 401


async def test_another_tenants_branch_is_no_branch():
    async with gateway() as bed:
        await checkpoint(bed)
        names = shown(await fork(bed))["branches"]
        assert (await bed.ask(branch(names[0]), key=OTHER)).status == 200
        assert decided(bed.sink.records[-1])["reason"] == "checkpoint_lost"
        assert (await end(bed, names[0], key=OTHER)).status == 404
        assert (await end(bed, names[0])).status == 200


async def test_a_fork_counts_as_a_request_of_the_quota():
    async with gateway() as bed:
        await checkpoint(bed)
        found = bed.gateway.snapshot
        acme, other = found.tenants
        bed.gateway.configure(replace(found, tenants=(replace(acme, rpm=1), other), version=found.version + 1))
        assert [(await fork(bed)).status for _ in range(2)] == [201, 429]
        assert bed.gateway.quotas.active("acme") == 0


async def test_a_tenant_has_so_many_forks_and_no_more(monkeypatch):
    monkeypatch.setattr("workers.forks.MOST_FORKS", 3)
    async with gateway("gw-a") as one, gateway("gw-b") as two:
        await checkpoint(one)
        names = [shown(await fork(bed, branches=1))["branches"][0] for bed in (one, two, one)]
        answer = await fork(two)
        assert (answer.status, answer.error["code"]) == (429, "rate_limit_exceeded")
        assert (answer.error["param"], int(answer.headers["retry-after"])) == ("branches", 60)
        redis = live._client(settings.REDIS_URL)
        assert len(redis.keys("answers:acme|fork:*")) == len(redis.keys("answers:acme|left:*")) == 3
        assert (await end(one, names[0])).status == 200
        assert (await fork(two)).status == 201, "one has ended"
        await one.ask(completion(metadata={"workflow_id": "w1", "step_key": "plan"}, checkpoint=60), key=OTHER)
        await until_on_loop(lambda: redis.keys("answers:other|at:*"))
        assert (await fork(two, key=OTHER)).status == 201, "tenants are bounded each by itself"


async def test_forks_whose_lease_is_over_make_room(monkeypatch):
    monkeypatch.setattr("workers.forks.MOST_FORKS", 2)
    async with gateway() as bed:
        await checkpoint(bed)
        names = [shown(await fork(bed))["branches"][0] for _ in range(2)]
        redis = live._client(settings.REDIS_URL)
        (of_first,) = (key for key in redis.keys("answers:acme|left:*") if names[0][:-2].encode() in key)
        redis.zadd("answers:acme|forks", {names[0].rpartition("-")[0]: 1.0})
        assert (await fork(bed)).status == 201
        assert not redis.exists(of_first)
        assert (await end(bed, names[1])).status == 200


async def test_a_branch_that_is_used_keeps_its_fork_among_those_that_count(monkeypatch):
    async with gateway() as bed:
        await checkpoint(bed)
        name = shown(await fork(bed))["branches"][0]
        redis = live._client(settings.REDIS_URL)
        fork_id = name.rpartition("-")[0]
        before = redis.zscore("answers:acme|forks", fork_id)
        redis.zadd("answers:acme|forks", {fork_id: before - 50})
        assert (await bed.ask(branch(name))).status == 200
        assert redis.zscore("answers:acme|forks", fork_id) >= before


async def test_checkpoints_that_end_soonest_make_room_for_further_ones(monkeypatch):
    monkeypatch.setattr("workers.forks.MOST_CHECKPOINTS", 2)
    redis = live._client(settings.REDIS_URL)
    async with gateway() as bed:
        for number, (lease_s, left) in enumerate([(60, 1), (30, 2), (90, 2), (10, 2)]):
            metadata = {"workflow_id": "w1", "step_key": f"s{number}"}
            await bed.ask(completion(metadata=metadata, checkpoint=lease_s))
            at = f"answers:acme|at:{name_of_step('w1', f's{number}')}"
            await until_on_loop(partial(redis.exists, at))
            assert len(redis.keys("answers:acme|at:*")) == redis.scard("answers:acme|steps:w1") == left
        assert [(await fork(bed, step=f"s{number}")).status for number in (0, 1, 2, 3)] == [404, 404, 201, 201]


def test_what_checkpoints_and_forks_take_of_redis():
    """The longest names, 64 branches: MOST_CHECKPOINTS and MOST_FORKS times as much is what a tenant can take."""
    redis, count = live._client(settings.REDIS_URL), 200
    for number in range(count):
        workflow = f"{number:0120}"
        found = forks.KvCheckpoint("i" * 60, f"req-{number:032}", 100_000, 3_600.0)
        live.run(forks.keep_checkpoint("acme", workflow, "plan", found, 3_600.0))
        (found,) = [live.run(forks.read_checkpoint("acme", workflow, "plan"))]
        live.run(forks.open_fork("acme", forks.fork_name(workflow, "f" * 120), "plan", 64, found))
    taken = {kind: sum(map(redis.memory_usage, redis.keys(f"answers:acme|{kind}*"))) / count for kind in KINDS}
    assert taken["at:"] + taken["steps:"] + taken["checkpoints"] <= 2_000, taken
    assert sum(taken[kind] for kind in ("fork:", "left:", "forks", "asked:", "of:")) <= 1_500, taken


async def test_without_redis_branches_are_computed():
    async with gateway(url=AWAY) as bed:
        assert (await bed.ask(step())).status == 200
        assert (await bed.ask(branch("fork-1-0"))).status == 200
        for answer in (await fork(bed), await end(bed, "fork-1-0")):
            assert (answer.status, answer.error["code"]) == (503, "workflows_unavailable")
