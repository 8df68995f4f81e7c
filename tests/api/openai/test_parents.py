"""Parents that a client names for the steps of a workflow: through two gateways and a real Redis, to the records."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest
from django.conf import settings

from controller.predict.pattern_graphs import levels_of
from tests.api.openai.gateways import completion
from tests.api.openai.workflow_gateways import OTHER, gateway
from workers import live
from workers.live import run
from workers.workflows import MEMORY_KEY, MOST_NAMED, NAMED_KEY, WORKFLOWS_KEY, StepOfWorkflow, run_orders

pytestmark = pytest.mark.db


@pytest.fixture(autouse=True)
def empty(redis_server):
    live._client(settings.REDIS_URL).flushdb()


def step(parents=None, workflow="w1", **fields):
    told = {} if parents is None else {"parents": parents}
    return completion(metadata={"workflow_id": workflow, **told}, **fields)


def calls(workflow="w1"):
    """As the next request would be told."""
    order = StepOfWorkflow("acme", workflow, None, 1, 5, wanted=True)
    return order.found(run(run_orders([order]))[0]).calls


async def test_parents_by_request_id_hold_at_another_gateway_and_stand_in_the_record():
    async with gateway("gw-a") as one, gateway("gw-b") as two:
        await one.ask(step(workflow_deadline=60))
        plan = one.sink.records[-1].id
        await two.ask(step([plan]))
        await asyncio.sleep(0.4)
        await one.ask(step([plan]))  # begins after the other one has ended, and does not depend on it
        await two.ask(step([two.sink.records[0].id, one.sink.records[-1].id]))
        assert two.sink.records[0].parents == [plan]
        assert one.sink.records[0].parents is None
        found = calls()[:4]
        assert [call.parents for call in found] == [None, (1,), (1,), (2, 3)]
        assert levels_of(found) == [0, 1, 1, 2]


async def test_parents_by_step_key():
    async with gateway() as bed:
        (acme, other) = bed.gateway.snapshot.tenants
        bed.gateway.configure(replace(bed.gateway.snapshot, tenants=(replace(acme, retention_s=600), other)))
        named = {"workflow_id": "w1", "step_key": "plan"}
        await bed.ask(completion(metadata=named, workflow_deadline=60))
        await asyncio.sleep(0.4)
        again = await bed.ask(completion(metadata=named))  # gets what is kept, and no name
        assert dict(again.headers)["x-slackline-stored"] == bed.sink.records[0].id
        await bed.ask(completion(metadata={"workflow_id": "w1", "step_key": "write", "parents": ["plan"]}))
        assert bed.sink.records[-1].step_key == "write"
        assert [call.parents for call in calls() if call.parents] == [(1,)]


@pytest.mark.parametrize("parents", [["nothing"], ["req-000000000000000000000000"]])
async def test_an_unknown_parent_is_refused_and_leaves_no_trace(parents):
    async with gateway() as bed:
        refused = await bed.ask(step(parents, workflow_deadline=60))
        assert (refused.status, refused.error["param"]) == (400, "metadata.parents")
        assert parents[0] in refused.error["message"]
        assert live._client(settings.REDIS_URL).keys("slackline:workflows:*") == [MEMORY_KEY.encode()]
        await bed.ask(step(workflow_deadline=60))
        assert (await bed.ask(step(parents))).status == 400
        assert len(calls()) == 2  # the one that was let in, and that which asks


async def test_a_step_of_another_tenant_or_workflow_is_unknown():
    async with gateway() as bed:
        await bed.ask(step(workflow_deadline=60))
        mine = bed.sink.records[-1].id
        await bed.ask(step(workflow="w2", workflow_deadline=60))
        assert (await bed.ask(step([mine], workflow="w2"))).status == 400
        await bed.ask(step(workflow_deadline=60), key=OTHER)
        assert (await bed.ask(step([mine]), key=OTHER)).error["param"] == "metadata.parents"


async def test_steps_cannot_depend_on_each_other():
    async with gateway() as bed:
        (acme, other) = bed.gateway.snapshot.tenants
        bed.gateway.configure(replace(bed.gateway.snapshot, tenants=(replace(acme, retention_s=600), other)))

        def named(key, *parents):
            return completion(metadata={"workflow_id": "w1", "step_key": key, "parents": list(parents)})

        await bed.ask(named("a") | {"workflow_deadline": 60})
        await bed.ask(named("b", "a"))
        refused = await bed.ask(named("a", "b"))
        assert (refused.status, refused.error["param"]) == (400, "metadata.parents")
        assert "depend on each other" in refused.error["message"]
        assert "itself" in (await bed.ask(named("a", "a"))).error["message"]


async def test_a_step_that_failed_gives_its_name_to_the_next_attempt():
    async with gateway() as bed:
        (acme, other) = bed.gateway.snapshot.tenants
        bed.gateway.configure(replace(bed.gateway.snapshot, tenants=(replace(acme, retention_s=600), other)))
        plan = completion(metadata={"workflow_id": "w1", "step_key": "plan"})
        await bed.ask(plan | {"workflow_deadline": 60})
        bed.gateway.workflows.ended("acme", "w1", answered=False, output_tokens=0, number=1)
        await asyncio.sleep(0.4)
        await bed.ask(plan | {"max_tokens": 3, "metadata": {"workflow_id": "w1", "step_key": "plan 2"}})
        board = live._client(settings.REDIS_URL)
        order = StepOfWorkflow("acme", "w1", None, 1, 5, name="plan")
        order.found(run(run_orders([order]))[0])
        scores = board.zrange(NAMED_KEY.format(tenant="acme", workflow="w1"), 0, -1, withscores=True)
        assert sorted(score for _, score in scores) == [2, 3]


async def test_names_are_bounded_and_end_with_their_workflow():
    board = live._client(settings.REDIS_URL)
    orders = [StepOfWorkflow("acme", "w1", 60, name=f"step {number}") for number in range(MOST_NAMED + 40)]
    for order in orders:
        run(run_orders([order]))
    key = NAMED_KEY.format(tenant="acme", workflow="w1")
    assert board.zcard(key) == MOST_NAMED
    state = board.pttl(WORKFLOWS_KEY.format(tenant="acme") + "|w1")
    assert abs(board.pttl(key) - state) < 1_000
    assert board.memory_usage(key) < 8_000


async def test_without_a_deadline_or_redis_parents_are_recorded_and_not_checked():
    async with gateway() as bed:
        assert (await bed.ask(step(["somewhere"]))).status == 200
        assert bed.sink.records[-1].parents == ["somewhere"]
        bed.gateway.workflows.board = None
        assert (await bed.ask(step(["somewhere"], workflow_deadline=60))).status == 200
