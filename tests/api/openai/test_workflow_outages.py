"""Steps of workflows whose Redis hangs or refuses them: what it knows of them afterwards."""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace

import pytest
from django.conf import settings

from tests.api.openai.gateways import completion
from tests.api.openai.workflow_gateways import gateway
from tests.faults.outage import hanging
from tests.waiting import until_on_loop
from workers import live
from workers.live import run
from workers.workflows import MissedStep, StepOfWorkflow, read_workflow, run_orders

pytestmark = pytest.mark.db


@pytest.fixture(autouse=True)
def empty(redis_server):
    live._client(settings.REDIS_URL).flushdb()


def keyed(key="", workflow="w1", *, parents=None, **fields):
    told = {"workflow_id": workflow} | ({"step_key": key} if key else {})
    return completion(metadata=told | ({} if parents is None else {"parents": parents}), **fields)


def joined(workflow="w1"):
    """As the next request would be told."""
    order = StepOfWorkflow("acme", workflow, None, 1, 5, wanted=True)
    return order.found(run(run_orders([order]))[0])


def keeping(bed):
    """Its tenant may name steps."""
    found = bed.gateway.snapshot
    tenants = tuple(replace(each, retention_s=600) for each in found.tenants)
    bed.gateway.configure(replace(found, tenants=tenants, version=found.version + 1))


async def test_steps_that_were_served_while_redis_hung_have_names_and_are_no_calls_that_run(redis_server):
    """Of the first one Redis had received the question, and answers it late."""
    async with gateway() as bed:
        keeping(bed)
        assert (await bed.ask(keyed("plan", workflow_deadline=60))).status == 200
        with hanging(redis_server):
            for key in ("read", "draw"):
                assert (await bed.ask(keyed(key, workflow_deadline=60))).status == 200
            began = time.time()
            assert (await bed.ask(keyed("first", "w2", workflow_deadline=30))).status == 200
            await asyncio.sleep(1.5)
        await until_on_loop(lambda: not bed.gateway.workflows.untold)
        written = await bed.ask(keyed("write", parents=["read", "draw"]))
        assert written.status == 200, written.body
        await until_on_loop(lambda: not bed.gateway.workflows.untold)
        found = joined()
        assert (found.number, found.before) == (5, 2), "plan and write"
        assert [call.number for call in found.calls if call.ended is not None] == [1, 4]
        assert [call.number for call in found.calls if call.ended is None] == [5], "the one that asks"
        other = run(read_workflow("acme", "w2"))
        assert (other.seen, other.answered, other.deadline_s) == (1, 1, 30)
        assert other.due_at == pytest.approx(began + 30, abs=0.5), "from its first request, not from Redis' return"


def test_a_question_that_redis_gets_late_begins_nothing_and_what_was_missed_is_counted_once():
    """A gateway gave up its fourth run, and told of it in its fifth, which comes twice."""
    step = StepOfWorkflow("acme", "w1", 60.0, 1, 5, name="plan")
    missed = MissedStep(step, 4, 2.0)
    for _ in range(2):
        run(run_orders([missed], "gw", 5, missed=5))
    assert run(run_orders([step], "gw", 4)) == [None]
    assert run(read_workflow("acme", "w1")).left_s == pytest.approx(58, abs=0.5)
    assert (joined().number, joined().before) == (2, 1)
    assert run(run_orders([step], "gw", 6))[0][3] == 4


def test_a_question_that_redis_had_answered_keeps_its_number():
    """The answer was lost. Two steps of one run had the same name."""
    step = StepOfWorkflow("acme", "w1", 60.0, 1, 5, name="plan")
    run(run_orders([step, step, StepOfWorkflow("acme", "w1", None, 1, 5, name="read")], "gw", 4))
    missed = MissedStep(step, 4, 0.3)
    run(run_orders([missed, missed], "gw", 5, missed=5))
    found = joined()
    assert (found.number, found.before) == (4, 1)
    assert [call.number for call in found.calls] == [3, 4]


async def test_a_step_that_is_refused_after_it_has_asked_is_no_call_of_its_workflow():
    """Its key has an answer to another body."""
    async with gateway() as bed:
        keeping(bed)
        assert (await bed.ask(keyed("plan", workflow_deadline=60))).status == 200
        await until_on_loop(lambda: bed.gateway.steps.counts["kept"] == 1)
        refused = await bed.ask(keyed("plan", prompt=[9, 9, 9]))
        assert (refused.status, refused.error["param"]) == (409, "metadata.step_key")
        await until_on_loop(lambda: not bed.gateway.workflows.untold)
        found = joined()
        assert (found.number, found.before) == (3, 1)
        assert [call.number for call in found.calls] == [1, 3]
