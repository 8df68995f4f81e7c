"""A workflow that is forked, and whose branches one request merges: from the gateway to the page and the graph."""

from __future__ import annotations

import asyncio
import json
import re

import pytest
from django.conf import settings
from django.urls import reverse

from controller.core.types import RequestRecord
from controller.models import WorkflowResult
from controller.predict.pattern_graphs import levels_of
from tests import factories
from tests.api.openai.gateways import TestBed, completion
from tests.api.openai.test_steps import gateway
from tests.waiting import until_on_loop
from workers import live
from workers.analysis import graph_versions
from workers.workflows import StepOfWorkflow, run_orders

pytestmark = [pytest.mark.db, pytest.mark.django_db]


@pytest.fixture(autouse=True)
def board(redis_server):
    live._client(settings.REDIS_URL).flushdb()


async def asked(bed: TestBed, parents: list[str] | None = None, branch: str = "", **metadata: str) -> str:
    """A request of the workflow, and its id. The gateway has told Redis of its end when it returns."""
    told = {"workflow_id": "w1", **metadata, **({} if parents is None else {"parents": parents})}
    more = {"branch": branch, "prompt": [1, 2, 3, 4, 5, 6]} if branch else {}
    if metadata.get("step_key") == "plan":
        more = {"checkpoint": 60, "workflow_deadline": 60}
    answer = await bed.ask(completion(metadata=told, **more))
    assert answer.status == 200, answer.body
    await asyncio.sleep(0.4)
    return answer.headers["x-slackline-request-id"]


def forked_and_merged() -> list[RequestRecord]:
    """A plan, its two branches one after the other, and the request that merges them."""

    async def run() -> list[RequestRecord]:
        async with gateway() as bed:
            await asked(bed, step_key="plan", stage="plan")
            await until_on_loop(lambda: live._client(settings.REDIS_URL).keys("answers:acme|at:*"))
            answer = await bed.ask({"step": "plan", "branches": 2}, "/v1/workflows/w1/fork")
            assert answer.status == 201, answer.body
            left, right = json.loads(answer.body)["branches"]
            ends = [await asked(bed, ["plan"], left, stage="left"), await asked(bed, ["plan"], right, stage="right")]
            await asked(bed, ends, stage="merge")
            return list(bed.sink.records)

    return asyncio.run(run())


def test_a_request_with_parents_of_two_branches_is_drawn_learned_and_counted_as_one_that_merges_them(viewer):
    factories.tenant(name="acme")
    records = forked_and_merged()
    plan, left, right, merge = records
    assert (plan.parents, left.parents, right.parents) == (None, ["plan"], ["plan"])
    assert merge.parents == [left.id, right.id]
    assert [step["reason"] for each in records for step in each.decisions if step["kind"] == "fork"] == [
        "from_checkpoint"
    ] * 2

    order = StepOfWorkflow("acme", "w1", None, 1, 5, wanted=True)  # what the next request would be matched by
    calls = order.found(live.run(run_orders([order]))[0]).calls[:4]
    assert [call.parents for call in calls] == [None, (1,), (1,), (2, 3)]
    assert levels_of(calls) == [0, 1, 1, 2]

    factories.records_stored(*records)
    result = WorkflowResult.objects.get()
    assert (result.requests, result.failed, result.missed, result.in_time) == (4, 0, 0, True)
    assert result.tokens == sum(each.prompt_tokens + each.output_tokens for each in records)

    later = graph_versions.timezone.now() + graph_versions.timedelta(seconds=graph_versions.IDLE_S + 5)
    (found,) = graph_versions.finished_workflows("acme", later)
    assert [call.parents for call in found.calls] == [None, (1,), (1,), (2, 3)]
    assert levels_of(found.calls) == [0, 1, 1, 2]

    page = viewer.get(reverse("workflow"), {"tenant": "acme", "workflow": "w1"}).content.decode()
    drawn = page.partition('<div class="workflow-chart"')[2].partition("</svg>")[0]
    assert re.findall(r'<text class="mark"[^>]*>(\w+)<', drawn) == ["branch", "branch"]
    paths = re.findall(r'<path class="([^"]*)" d="M([\d.]+) ([\d.]+)V([\d.]+)H', drawn)
    told = [(float(begins), float(ends)) for kind, _, begins, ends in paths if "inferred" not in kind]
    assert len(told) == len(paths) == 4  # from the plan to each branch, from each branch to the merge
    ends = sorted(end for _, end in told)
    assert ends[2] == ends[3], "two of them end at the same bar"
    assert len({begin for begin, end in told if end == ends[3]}) == 2
    assert len({begin for begin, end in told if end != ends[3]}) == 1
