"""`POST /v1/workflows/{id}/steps`: tool steps that a client reports, through two gateways and a real Redis."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace

import pytest
from django.conf import settings

from controller.predict.pattern_graphs import MOST_NODES, kind_of_tool, levels_of
from tests.api.openai.gateways import completion
from tests.api.openai.test_parents import calls
from tests.api.openai.test_steps import gateway, kept
from tests.api.openai.workflow_gateways import OTHER
from workers import live
from workers.steps import LARGEST_BYTES
from workers.workflows import (
    MOST_TOOLS,
    WORKFLOWS_KEY,
    ReadWorkflow,
    ReportTool,
    StepOfWorkflow,
    read_workflow,
    run_orders,
)

pytestmark = pytest.mark.db
TOOL = {"kind": "tool", "name": "search"}


@pytest.fixture(autouse=True)
def empty(redis_server):
    live._client(settings.REDIS_URL).flushdb()


async def report(bed, workflow="w1", caller=None, **fields):
    answer = await bed.ask({**TOOL, **fields}, f"/v1/workflows/{workflow}/steps", **({"key": caller} if caller else {}))
    return answer.status, answer.error if answer.status >= 400 else json.loads(answer.body)


def call(parents=None, workflow="w1", **fields):
    told = {} if parents is None else {"parents": parents}
    return completion(metadata={"workflow_id": workflow, **told}, **fields)


async def test_a_tool_step_is_a_node_and_stands_in_the_record_of_the_next_request():
    async with gateway("gw-a") as one, gateway("gw-b") as two:
        await one.ask(call(workflow_deadline=60))
        plan = one.sink.records[-1].id
        status, told = await report(two, took=1.5, parents=[plan])
        assert (status, told["stored"], told["kept"]) == (201, False, False)
        await two.ask(call([told["id"]]))
        await one.ask(call())
        (step,) = two.sink.records[-1].tool_steps
        assert (step["key"], step["name"], step["parents"]) == (told["id"], "search", (plan,))
        assert step["ended"] - step["began"] == pytest.approx(1.5, abs=0.01)
        assert one.sink.records[-1].tool_steps == []
        found = sorted(calls()[:3], key=lambda each: each.number)
        assert [each.parents for each in found] == [None, (1,), (2,)]
        assert (found[1].kind, found[1].output_tokens) == (kind_of_tool("search"), 0)
        assert levels_of(found) == [0, 1, 2]
        (kept,) = live.run(read_workflow("acme", "w1")).tools
        assert (kept.name, kept.parents) == ("search", (plan,))


async def test_a_client_that_died_gets_the_result_and_its_state_again():
    done = {"key": "s1", "took": 2, "input_digest": "a", "result": {"found": [1]}, "state_ref": "disk-7"}
    async with gateway("gw-a") as one, gateway("gw-b") as two:
        await one.ask(call(workflow_deadline=60))
        assert (await report(two, key="s1", input_digest="a"))[1] == {
            "id": "s1", "object": "workflow.step", "kind": "tool", "name": "search", "stored": False,
        }  # fmt: skip
        status, told = await report(one, **done)
        assert (status, told["kept"]) == (201, True)
        for asked in ({"key": "s1", "input_digest": "a"}, done):
            status, told = await report(two, **asked)
            assert (status, told["stored"], told["result"], told["state_ref"]) == (200, True, {"found": [1]}, "disk-7")
        assert len(live.run(read_workflow("acme", "w1")).tools) == 1
        status, error = await report(two, key="s1", input_digest="b")
        assert (status, error["code"], error["param"]) == (409, "step_exists", "key")


async def test_equal_tool_steps_of_a_tenant_that_opted_in_share_a_result_until_it_is_forgotten():
    async with gateway("gw-a") as one, gateway("gw-b") as two:
        for workflow in ("w1", "w2"):
            await one.ask(call(workflow=workflow, workflow_deadline=60))
        asked = {"input_digest": "a", "share_result": True}
        assert (await report(one, key="k", took=1, result="first", **asked))[0] == 201
        status, told = await report(two, "w2", **asked)
        assert (status, told["stored"], told["result"]) == (200, True, "first")
        for other in ({"input_digest": "b", "share_result": True}, {"input_digest": "a", "key": "x"}):
            assert (await report(two, "w2", **other))[1]["stored"] is False
        assert (await report(two, "w2", **asked, name="browse"))[1]["stored"] is False
        assert (await report(two, "w2", OTHER, **asked))[1]["stored"] is False
        await two.ask(b"", "/v1/workflows/w1/steps", method="DELETE")
        assert (await report(two, "w2", **asked))[1]["stored"] is False
        assert (await report(two, "w2", key="k2", took=1, result="second", **asked))[0] == 201
        assert (await report(one, **asked))[1]["result"] == "second"


@pytest.mark.parametrize(
    "raw", [b"", b"no JSON", b"[]", b'{"tool": "w1"}', b'{"tool": [1, 2]}', b'{"step": ["w1", "k"]}']
)
async def test_a_result_that_cannot_be_found_again_is_none(raw):
    """What is kept may be another release's."""
    asked = {"input_digest": "a", "share_result": True}
    async with gateway() as bed:
        await bed.ask(call(workflow_deadline=60))
        assert (await report(bed, key="k", took=1, result="first", **asked))[0] == 201
        redis = live._client(settings.REDIS_URL)
        (pointer,) = redis.keys("answers:acme|tool *")
        redis.set(pointer, raw)
        assert await report(bed, **asked) == (200, {
            "id": None, "object": "workflow.step", "kind": "tool", "name": "search", "stored": False,
        })  # fmt: skip


async def test_a_tool_step_does_not_take_the_key_of_a_request():
    async with gateway("gw-a") as one, gateway("gw-b") as two:
        await one.ask(call(workflow_deadline=60))
        for key in ("k1", "k2"):
            await one.ask(completion(metadata={"workflow_id": "w1", "step_key": key}))
        status, error = await report(two, key="k1", took=1, result="kept")
        assert (status, error["code"], error["param"]) == (409, "step_exists", "key")
        assert "a request" in error["message"]
        assert (await report(two, key="k1"))[1]["stored"] is False, "nothing was kept of it"
        assert live.run(read_workflow("acme", "w1")).tools == ()
        for _ in range(MOST_NODES):  # of later ones only the names are known
            await one.ask(call())
        await one.ask(completion(metadata={"workflow_id": "w1", "step_key": "late"}))
        assert (await report(two, key="late", took=1))[0] == 409
        for _ in range(2):
            assert (await report(two, key="tool", took=1, parents=["late"]))[0] == 201, "its own key again"
        await one.ask(call(["tool", "k2"]))
        assert [each["key"] for each in one.sink.records[-1].tool_steps] == ["tool"]


async def test_a_request_does_not_take_the_key_of_a_tool_step():
    async with gateway("gw-a") as one, gateway("gw-b") as two:
        await one.ask(call(workflow_deadline=60))
        assert (await report(two, key="k", took=1))[0] == 201
        refused = await one.ask(completion(metadata={"workflow_id": "w1", "step_key": "k"}))
        assert (refused.status, refused.error["code"]) == (409, "step_exists")
        assert refused.error["param"] == "metadata.step_key"
        assert "a tool step" in refused.error["message"]
        await one.ask(call(["k"]))
        assert [(each.number, each.parents) for each in calls() if each.parents] == [(3, (2,))], "it left no trace"
        named = completion(metadata={"workflow_id": "w2", "step_key": "k"}, workflow_deadline=60)
        assert (await one.ask(named)).status == 200, "keys are a workflow's own"


async def test_a_tool_step_takes_the_key_of_a_request_that_failed():
    async with gateway() as bed:
        await bed.ask(call(workflow_deadline=60))
        await bed.ask(completion(metadata={"workflow_id": "w1", "step_key": "k"}))
        bed.gateway.workflows.ended("acme", "w1", answered=False, output_tokens=0, number=2)
        await asyncio.sleep(0.4)
        for _ in range(2):
            assert (await report(bed, key="k", took=1))[0] == 201
        await bed.ask(call(["k"]))
        assert [each.parents for each in calls() if each.parents] == [(3,)]


@pytest.mark.parametrize("rule", ["accumulated", "own_share"])
async def test_what_computed_no_step_does_not_count_as_one_before(rule):
    async with gateway() as bed:
        (acme, other) = bed.gateway.snapshot.tenants
        bed.gateway.configure(replace(bed.gateway.snapshot, tenants=(replace(acme, stage_deadlines=rule), other)))
        plan = completion(metadata={"workflow_id": "w1", "step_key": "plan"})
        await bed.ask({**plan, "workflow_deadline": 600})
        await kept(bed)
        for _ in range(MOST_NODES):  # an agent that was started again
            assert (await bed.ask(plan)).headers["x-slackline-stored"]
        for _ in range(2):
            assert (await report(bed, took=0.1))[0] == 201
        await bed.ask(call())  # its retry is the second step
        bed.gateway.workflows.ended("acme", "w1", answered=False, output_tokens=0, number=MOST_NODES + 4)
        assert (await bed.ask(call())).status == 200
        assert (await bed.ask(call(workflow_steps_left=2))).status == 200
        due = {"accumulated": 450.0, "own_share": 150.0}[rule]  # the third of four
        assert bed.sink.records[-1].target_deadline_s == pytest.approx(due, abs=30)


async def test_nothing_is_kept_without_a_retention():
    async with gateway(retention_s=0) as bed:
        await bed.ask(call(workflow_deadline=60))
        status, error = await report(bed, took=1, key="k", result=1)
        assert (status, error["param"]) == (403, "result")
        assert (await report(bed, took=1, key="k"))[0] == 201
        assert not live._client(settings.REDIS_URL).keys("answers:*")


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"kind": "call", "took": 1}, "kind"),
        ({"name": "", "took": 1}, "name"),
        ({"took": -1}, "took"),
        ({"took": float("1e9")}, "took"),
        ({"took": True}, "took"),
        ({}, "took"),
        ({"took": 1, "ended_ago": "x"}, "ended_ago"),
        ({"took": 1, "result": 1}, "result"),
        ({"took": 1, "share_result": True}, "share_result"),
        ({"key": "k", "result": 1}, "result"),
        ({"took": 1, "state_ref": "a"}, "state_ref"),
        ({"took": 1, "key": "k", "state_ref": "a\n"}, "state_ref"),
        ({"took": 1, "key": "k", "state_ref": " a"}, "state_ref"),
        ({"took": 1, "key": "k", "state_ref": "a" * 513}, "state_ref"),
        ({"took": 1, "key": "k", "parents": ["k"]}, "parents"),
        ({"took": 1, "parents": ["nobody"]}, "parents"),
        ({"took": 1, "more": 1}, "more"),
    ],
)
async def test_a_wrong_report_names_its_field_and_leaves_no_trace(fields, param):
    async with gateway() as bed:
        await bed.ask(call(workflow_deadline=60))
        status, error = await report(bed, **fields)
        assert (status, error["param"]) == (400, param), error
        assert len(calls()) == 2  # the request, and that which asks


async def test_bounds_unknown_workflows_and_redis_away():
    async with gateway() as bed:
        assert (await report(bed, took=1))[0] == 404
        await bed.ask(call(workflow_deadline=60))
        assert (await report(bed, "w1", OTHER, took=1))[0] == 404
        status, error = await report(bed, took=1, key="k", result="x" * LARGEST_BYTES)
        assert (status, error["param"]) == (413, "result")
        for _ in range(MOST_TOOLS + 3):
            assert (await report(bed, took=0))[0] == 201
        assert len(live.run(read_workflow("acme", "w1")).tools) == MOST_TOOLS
        await bed.ask(b"", "/v1/workflows/w1/cancel")
        assert (await report(bed, took=1))[0] == 499
    async with gateway(url="redis://127.0.0.1:1/0") as bed:
        status, error = await report(bed, took=1)
        assert (status, error["code"]) == (503, "workflows_unavailable")


def test_long_reports_take_no_more_of_redis_than_many_short_ones():
    def ask(order):
        return order.found(live.run(run_orders([order]))[0])

    keys = [f"{number:02}".ljust(120, "🦊") for number in range(32)]
    ask(StepOfWorkflow("acme", "w1", 60))
    for key in keys:
        assert ask(ReportTool("acme", "w1", key, "search", 0.0, 0.0, None))
    for key in keys:
        assert ask(ReportTool("acme", "w1", key[::-1], "search", 0.0, 0.0, tuple(keys)))
    assert ask(ReportTool("acme", "w1", "last", "search", 0.0, 0.0, ())) == 2 * len(keys) + 2
    tools = ask(ReadWorkflow("acme", "w1")).tools
    assert [each.key for each in tools[:25]] == keys[:25]
    state = WORKFLOWS_KEY.format(tenant="acme") + "|w1"
    assert live._client(settings.REDIS_URL).memory_usage(state, samples=0) < 40_000
    assert ask(StepOfWorkflow("acme", "w1", None, name="next", parents=("last",))).tools == tools


async def test_a_request_gets_its_state_again_with_its_answer():
    named = {"workflow_id": "w1", "step_key": "s1", "state_ref": "disk-7"}
    async with gateway() as bed:
        await bed.ask(completion(metadata=named))
        await kept(bed)
        again = await bed.ask(completion(metadata={"workflow_id": "w1", "step_key": "s1"}))
        assert again.headers["x-slackline-state-ref"] == "disk-7"
