"""A workflow's deadline divided by recorded workflows: through two gateways and a real Redis, matched at each step."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest
from django.conf import settings

from controller.predict.pattern_graphs import Call, GraphsInForce, graph_of, kind_of, set_of
from tests.api.openai.gateways import completion
from tests.api.openai.test_workflows import joined
from tests.api.openai.workflow_gateways import gateway
from workers import live
from workers.live import run
from workers.workflows import WORKFLOWS_KEY, read_workflow

pytestmark = pytest.mark.db


@pytest.fixture(autouse=True)
def empty(redis_server):
    live._client(settings.REDIS_URL).flushdb()


def recorded(*stages: tuple[str, float], input_tokens: int = 5, output_tokens: int = 4):
    """A workflow whose stages followed each other, each with its seconds."""
    calls, at = [], 0.0
    for stage, seconds in stages:
        calls.append(Call(kind_of("demo", stage), at, at + seconds, input_tokens, output_tokens))
        at += seconds
    return graph_of(calls)


GRAPHS = GraphsInForce(
    7,
    set_of(
        [
            recorded(("plan", 2.0), ("search", 3.0), ("write", 5.0)),
            recorded(("plan", 2.0), ("write", 38.0)),
        ],
        [5.0, 1.0],
        {},
    ),
)


def step(stage: str, workflow: str = "w1", **fields):
    return completion(metadata={"workflow_id": workflow, "stage": stage}, **fields)


async def test_steps_get_the_shares_of_the_graph_that_the_workflow_is_like_by_then():
    async with gateway("gw-a") as one, gateway("gw-b") as two:
        for each in (one, two):
            each.gateway.workflows.take({"acme": GRAPHS})
        await one.ask(step("plan", workflow_deadline=100))
        found, deadline_s = joined(one)
        assert deadline_s == pytest.approx(20, rel=0.05)  # 2 of 10 s
        figures = found["figures"]
        assert (figures["shared_by"], figures["graph_version"], figures["steps_left"]) == ("graph", 7, 3)
        assert 0 < figures["similarity"] <= 1
        await asyncio.sleep(0.4)  # the first gateway tells Redis what the call did
        await two.ask(step("search"))
        found, deadline_s = joined(two)
        assert deadline_s == pytest.approx(99.5 * 3 / 8, rel=0.05)
        assert found["figures"]["steps_left"] == 2
        await asyncio.sleep(0.4)
        await one.ask(step("write"))
        assert joined(one)[1] == pytest.approx(99, rel=0.02)
        assert one.gateway.workflows.matched == 2

        await one.ask(step("plan", "w2", workflow_deadline=100))
        await one.ask(step("write", "w2"))  # no graph of the first kind goes on so
        found, deadline_s = joined(one)
        assert deadline_s == pytest.approx(100, rel=0.02)
        assert (found["figures"]["shared_by"], found["figures"]["steps_left"]) == ("graph", 1)


async def test_what_the_client_says_comes_before_the_graph():
    async with gateway() as bed:
        bed.gateway.workflows.take({"acme": GRAPHS})
        await bed.ask(step("plan", workflow_deadline=100, workflow_steps_left=2))
        found, deadline_s = joined(bed)
        assert deadline_s == pytest.approx(50, rel=0.01)
        assert found["figures"]["shared_by"] == "steps_left"
        assert "graph_version" not in found["figures"]


async def test_a_workflow_like_no_graph_and_a_tenant_without_any_keep_the_prior():
    async with gateway() as bed:
        bed.gateway.workflows.take({"other": GRAPHS})
        await bed.ask(step("plan", workflow_deadline=100))
        bed.gateway.workflows.take({"acme": GRAPHS})
        await bed.ask(step("dance", "w2", workflow_deadline=100))
        for _ in range(2):
            found, deadline_s = joined(bed)
            assert deadline_s == pytest.approx(100, rel=0.01)
            assert found["figures"]["shared_by"] == "last"
            bed.sink.records.pop()
        assert bed.gateway.workflows.unmatched == 1


async def test_a_workflow_of_many_steps_keeps_a_bounded_part_of_them():
    async with gateway() as bed:
        bed.gateway.workflows.take({"acme": GRAPHS})
        await bed.ask(step("plan", workflow_deadline=100))
        for _ in range(60):
            await bed.ask(step("search"))
        await asyncio.sleep(0.4)
        fields = live._client(settings.REDIS_URL).hgetall(WORKFLOWS_KEY.format(tenant="acme") + "|w1")
        kept = {name: value for name, value in fields.items() if name[:1] in (b"c", b"e") and name[1:].isdigit()}
        assert len(kept) == 70
        assert sum(len(name) + len(value) for name, value in kept.items()) < 2_500
        assert run(read_workflow("acme", "w1")).answered == 61


async def test_calls_that_failed_are_no_part_of_the_match():
    async with gateway() as bed:
        bed.gateway.workflows.take({"acme": GRAPHS})
        await bed.ask(step("plan", workflow_deadline=100))
        bed.gateway.workflows.ended("acme", "w1", answered=False, output_tokens=0, number=1)
        await asyncio.sleep(0.4)
        await bed.ask(step("plan"))
        assert joined(bed)[0]["figures"]["steps_left"] == 3


async def test_a_step_that_was_refused_is_no_part_of_the_match():
    """It has asked for its workflow before the quota on tokens refuses it."""
    async with gateway() as bed:
        (acme, other) = bed.gateway.snapshot.tenants
        bed.gateway.workflows.take({"acme": GRAPHS})
        bed.gateway.configure(replace(bed.gateway.snapshot, tenants=(replace(acme, tpm=1), other)))
        assert (await bed.ask(step("plan", workflow_deadline=100))).status == 429
        bed.gateway.configure(replace(bed.gateway.snapshot, tenants=(acme, other)))
        await asyncio.sleep(0.4)
        await bed.ask(step("plan"))
        again = joined(bed)[0]["figures"]
        await bed.ask(step("plan", "w2", workflow_deadline=100))
        assert again["similarity"] == joined(bed)[0]["figures"]["similarity"]
