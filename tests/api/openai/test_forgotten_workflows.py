"""Workflows whose Redis has lost its memory: their steps are served, and a wrong parent of any other stays an error."""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace

import pytest
from django.conf import settings

from tests.api.openai.gateways import completion
from tests.api.openai.workflow_gateways import gateway
from tests.waiting import until_on_loop
from workers import live
from workers.live import run
from workers.workflows import MEMORY_KEY, StepOfWorkflow, read_workflow, run_orders

pytestmark = pytest.mark.db


@pytest.fixture(autouse=True)
def empty(redis_server):
    lose_memory()


def lose_memory():
    """As a restart does: Redis writes nothing to a disk."""
    live._client(settings.REDIS_URL).flushdb()


def keyed(key, parents=None, workflow="w1", **fields):
    told = {"workflow_id": workflow, "step_key": key} | ({} if parents is None else {"parents": parents})
    return completion(metadata=told, **fields)


def keeping(bed):
    """Its tenant may name steps."""
    found = bed.gateway.snapshot
    tenants = tuple(replace(each, retention_s=600) for each in found.tenants)
    bed.gateway.configure(replace(found, tenants=tenants, version=found.version + 1))


async def refused(bed, *asked, **fields):
    answer = await bed.ask(keyed(*asked, **fields))
    if answer.status == 200:
        return False
    assert (answer.status, answer.error["param"]) == (400, "metadata.parents"), answer.body
    return True


def parents_of_calls(workflow="w1"):
    order = StepOfWorkflow("acme", workflow, None, 1, 5, wanted=True)
    return [call.parents for call in order.found(run(run_orders([order]))[0]).calls]


def workflow_step(bed):
    (found,) = [each for each in bed.sink.records[-1].decisions if each["kind"] == "workflow"]
    return found


async def test_steps_of_a_forgotten_workflow_are_served_and_its_unknown_parents_count_as_not_told():
    async with gateway() as bed:
        keeping(bed)
        assert not await refused(bed, "plan", workflow_deadline=60)
        lose_memory()
        assert not await refused(bed, "read", ["plan"], workflow_deadline=60)
        assert not await refused(bed, "draw", ["plan"])
        assert not await refused(bed, "write", ["read", "plan"], workflow_deadline=60)
        assert parents_of_calls()[:3] == [None, None, (1,)]
        assert [record.parents for record in bed.sink.records] == [None, ["plan"], ["plan"], ["read", "plan"]]


async def test_an_unknown_parent_of_a_workflow_that_redis_knows_from_its_beginning_stays_an_error():
    async with gateway() as bed:
        keeping(bed)
        assert await refused(bed, "read", ["plan"], workflow_deadline=60)
        assert not await refused(bed, "plan", workflow_deadline=60)
        assert await refused(bed, "read", ["plam"])
        assert await refused(bed, "read", ["plan", "plam"])


async def test_unknown_parents_are_errors_again_when_no_workflow_can_be_older_than_redis_memory():
    """A workflow is kept for its deadline and an hour: one of 60 s that begins later is known from its beginning."""
    async with gateway() as bed:
        keeping(bed)
        assert not await refused(bed, "plan", workflow_deadline=60)
        lose_memory()
        assert not await refused(bed, "read", ["plan"], workflow_deadline=60)
        client = live._client(settings.REDIS_URL)
        client.hset(MEMORY_KEY, "since", f"{time.time() - 3_700:.6f}")
        bed.gateway.workflows.memory.since = client.hget(MEMORY_KEY, "since").decode()
        assert await refused(bed, "read", ["plan"], workflow="w2", workflow_deadline=60)
        assert not await refused(bed, "read", ["plan"], workflow="w3", workflow_deadline=600), "it may be older"


async def test_one_gateway_that_remembers_tells_those_that_began_since():
    async with gateway("gw-a") as one:
        keeping(one)
        assert not await refused(one, "plan", workflow_deadline=60)
        lose_memory()
        await until_on_loop(lambda: one.gateway.workflows.memory.losses == 1)
    async with gateway("gw-b") as two:
        keeping(two)
        assert not await refused(two, "read", ["plan"], workflow_deadline=60)


async def test_what_the_gateway_knew_before_its_restart_is_enough():
    """`since` is in the file of what it has learned."""
    async with gateway() as bed:
        keeping(bed)
        assert not await refused(bed, "plan", workflow_deadline=60)
        known = bed.gateway.workflows.state()
    lose_memory()
    async with gateway() as bed:
        keeping(bed)
        bed.gateway.workflows.restore(known)
        assert not await refused(bed, "read", ["plan"], workflow_deadline=60)


async def test_a_gateway_gives_forgotten_workflows_their_deadlines_back():
    """Begun at one gateway, by a request and beforehand; the other one, which does not know them, goes on with them."""
    async with gateway("gw-a") as one, gateway("gw-b") as two:
        keeping(one)
        keeping(two)
        assert not await refused(one, "plan", workflow_deadline=60)
        stages = [{"name": "plan", "share": 1}, {"name": "write", "share": 3}]
        assert (await one.ask({"id": "w2", "deadline": 30, "stages": stages}, "/v1/workflows")).status == 201
        before = [run(read_workflow("acme", name)) for name in ("w1", "w2")]
        await asyncio.sleep(0.3)
        lose_memory()
        await until_on_loop(lambda: one.gateway.workflows.memory.losses == 1 and not one.gateway.workflows.untold)
        found = [run(read_workflow("acme", name)) for name in ("w1", "w2")]
        for known, again in zip(before, found, strict=True):
            assert again.due_at == pytest.approx(known.due_at, abs=1)
            assert (again.deadline_s, again.stages) == (known.deadline_s, known.stages)
        assert not await refused(two, "read", ["plan"])
        assert workflow_step(two)["reason"] == "workflow_inherited"
        assert workflow_step(two)["figures"]["left_s"] < 59.8


async def test_the_step_that_notices_gets_its_deadline_back_at_once():
    async with gateway() as bed:
        keeping(bed)
        assert not await refused(bed, "plan", workflow_deadline=60)
        lose_memory()
        report = {"kind": "tool", "name": "search", "key": "found", "took": 0.1, "parents": ["plan"]}
        told = await bed.ask(report, "/v1/workflows/w1/steps")
        assert told.status == 201, told.body
        assert not await refused(bed, "write", ["found"])
        assert workflow_step(bed)["reason"] == "workflow_inherited"


async def test_a_cancelled_workflow_is_not_given_back():
    async with gateway() as bed:
        keeping(bed)
        assert not await refused(bed, "plan", workflow_deadline=60)
        assert (await bed.ask(b"", "/v1/workflows/w1/cancel")).status == 200
        lose_memory()
        assert (await bed.ask(keyed("read", ["plan"]))).error["code"] == "cancelled"
        assert run(read_workflow("acme", "w1")) is None
