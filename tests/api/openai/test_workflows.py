"""One deadline for a workflow: through two gateways and a real Redis, from the requests to their records."""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import replace
from types import SimpleNamespace

import pytest
from django.conf import settings

from api.openai import status
from api.openai.workflows import Workflows
from controller.core.types import LatencyCoefficients
from tests.api.openai.gateways import completion
from tests.api.openai.workflow_gateways import OTHER, call, config, gateway
from tests.faults.outage import hanging
from tests.waiting import until_on_loop
from workers import live, workflows
from workers.backends.fake import Script
from workers.workflows import AT_ONCE, WORKFLOWS_KEY, read_workflow

pytestmark = pytest.mark.db


@pytest.fixture(autouse=True)
def empty(redis_server):
    live._client(settings.REDIS_URL).flushdb()


def joined(bed):
    """What the newest record says of its workflow, and the deadline that applied."""
    record = bed.sink.records[-1]
    steps = [step for step in record.decisions if step["kind"] == "workflow"]
    return (steps[0] if steps else None), record.target_deadline_s


async def test_a_later_request_inherits_what_is_left_at_another_gateway():
    async with gateway("gw-a") as one, gateway("gw-b") as two:
        assert (await one.ask(call(workflow_deadline=10))).status == 200
        step, deadline_s = joined(one)
        assert step["reason"] == "workflow_began"
        assert deadline_s == pytest.approx(10, abs=0.01)
        await asyncio.sleep(0.5)
        assert (await two.ask(call())).status == 200
        step, deadline_s = joined(two)
        assert step["reason"] == "workflow_inherited"
        assert step["subject"] == "w1"
        assert deadline_s == pytest.approx(9.5, abs=0.2)
        assert two.sink.records[-1].workflow == "w1"


@pytest.mark.parametrize(("rule", "second"), [("share_of_rest", 27.5 / 3), ("accumulated", 7.5), ("own_share", 10.0)])
async def test_the_tenants_rule_divides_what_a_late_first_stage_leaves(rule, second):
    stages = (workflows.Stage("plan", 1.0), workflows.Stage("write", 1.0), workflows.Stage("check", 2.0))
    async with gateway() as bed:
        snapshot = bed.gateway.snapshot
        tenants = tuple(replace(each, stage_deadlines=rule) for each in snapshot.tenants)
        bed.gateway.configure(replace(snapshot, tenants=tenants))
        await bed.gateway.workflows.open(workflows.OpenWorkflow("acme", "w1", 40.0, stages))
        client = live._client(settings.REDIS_URL)
        name = WORKFLOWS_KEY.format(tenant="acme")
        client.zincrby(name, -12.5, "w1")  # it began so much earlier
        await bed.ask(completion(metadata={"workflow_id": "w1", "stage": "write"}))
        step, deadline_s = joined(bed)
        assert deadline_s == pytest.approx(second, abs=0.3)
        assert step["figures"].get("stage_deadlines", "share_of_rest") == rule


async def test_steps_that_follow_leave_a_request_its_share():
    async with gateway() as bed:
        await bed.ask(call(workflow_deadline=12, workflow_steps_left=4))
        step, deadline_s = joined(bed)
        assert deadline_s == pytest.approx(3, abs=0.01)
        assert step["figures"]["steps_left"] == 4
        await bed.ask(call(workflow_steps_left=2))
        assert joined(bed)[1] == pytest.approx(6, abs=0.2)  # the first one left more than its share


async def test_a_slow_step_makes_the_next_one_more_urgent_than_another_workflows():
    """Both wait for one slot. The workflow that has lost time is served first, although it came last."""
    found = config()
    (first, *_) = found.instances
    async with gateway() as bed:
        bed.gateway.configure(replace(found, instances=(replace(first, max_num_seqs=1),)))
        await bed.ask(call("slow", workflow_deadline=2))
        await asyncio.sleep(1.0)
        bed.every(Script(token_delay_s=0.1), Script())
        running = bed.send(completion())
        await until_on_loop(lambda: bed.backend(first.id).running)
        fresh = bed.send(call("fresh", workflow_deadline=2))
        await until_on_loop(lambda: len(bed.gateway.scheduler.dispatcher.queue().ids()) == 1)
        slow = bed.send(call("slow"))
        await until_on_loop(lambda: len(bed.gateway.scheduler.dispatcher.queue().ids()) == 2)
        for client in (running, slow, fresh):
            await client.done()
        served = [record.workflow for record in bed.sink.records]
        assert served[-2:] == ["slow", "fresh"]


async def test_the_first_deadline_counts_and_a_late_workflow_is_served_by_its_own_targets():
    async with gateway() as bed:
        await bed.ask(call(workflow_deadline=0.2))
        await asyncio.sleep(0.3)
        answer = await bed.ask(call(workflow_deadline=60))
        assert answer.status == 200
        step, deadline_s = joined(bed)
        assert step["reason"] == "workflow_late"
        assert step["figures"]["left_s"] < 0
        assert deadline_s is None


async def test_a_request_may_have_an_earlier_deadline_of_its_own():
    async with gateway() as bed:
        await bed.ask(call(workflow_deadline=30, deadline=5, target_ttft=1))
        assert joined(bed)[1] == 5
        await bed.ask(call(deadline=60, target_ttft=40))  # its first token is due with the workflow at the latest
        assert joined(bed)[1] == pytest.approx(30, abs=0.3)
        assert bed.sink.records[-1].target_ttft_s == pytest.approx(30, abs=0.3)


async def test_a_share_that_is_too_small_is_served_late_and_not_refused():
    """Shares are guesses: a step may take longer, and those after it have less. Only the workflow's own end is firm."""
    found = config()
    (first, *_) = found.instances
    latency = LatencyCoefficients(0.5, 0.0, 0.0, 0.02, 0.0, 0.001)  # no answer comes in less than half a second
    async with gateway() as bed:
        bed.gateway.configure(replace(found, instances=(replace(first, max_num_seqs=1, latency=latency),)))
        answer = await bed.ask(call(workflow_deadline=20, workflow_steps_left=100))
        assert answer.status == 200
        bed.every(Script(first_delay_s=0.6), Script())
        running = bed.send(completion())
        await until_on_loop(lambda: bed.backend(first.id).running)
        waiting = await bed.ask(call(workflow_steps_left=100))  # its share, 0.2 s, is over before there is room
        assert waiting.status == 200
        await running.done()


async def test_a_deadline_that_cannot_hold_the_first_step_is_refused_and_a_late_workflow_is_not():
    found = config()
    (first, *_) = found.instances
    latency = LatencyCoefficients(0.5, 0.0, 0.0, 0.02, 0.0, 0.001)  # no answer comes in less than half a second
    async with gateway() as bed:
        bed.gateway.configure(replace(found, instances=(replace(first, latency=latency),)))
        assert (await bed.ask({"id": "w2", "deadline": 0.001}, "/v1/workflows")).status in (200, 201)
        for body in (call(workflow_deadline=0.001), call("w2"), call(workflow_deadline=0.001)):  # the last one again
            answer = await bed.ask(body)
            assert (answer.status, answer.error["code"]) == (429, "slo_infeasible"), answer.body
            assert answer.error["param"] == "workflow_deadline"
            assert answer.error["message"].endswith("its workflow's deadline is 1 ms. Raise workflow_deadline.")
            assert answer.headers["x-should-retry"] == "false"
            await until_on_loop(lambda: not bed.gateway.workflows.untold)
        assert (await bed.ask(call("w3", workflow_deadline=5))).status == 200
        await asyncio.sleep(0.01)
        assert (await bed.ask(call("w4", workflow_deadline=1.0))).status == 200
        await asyncio.sleep(1.1)
        assert (await bed.ask(call("w4"))).status == 200
        assert joined(bed)[0]["reason"] == "workflow_late"


async def test_a_class_may_have_an_earlier_deadline_and_keeps_its_name():
    found = config()
    (chat,) = found.classes
    async with gateway() as bed:
        bed.gateway.configure(replace(found, classes=(replace(chat, deadline_s=5.0),)))
        await bed.ask(call(workflow_deadline=30))
        record = bed.sink.records[-1]
        assert (record.target_deadline_s, record.slo_class) == (5.0, "chat")
        assert record.decisions[0]["reason"] == "tenant_default"


async def test_workflows_of_other_tenants_and_requests_without_one_are_not_touched():
    async with gateway() as bed:
        await bed.ask(call(workflow_deadline=10))
        await bed.ask(call(), key=OTHER)
        assert joined(bed) == (None, None)
        await bed.ask(completion())
        assert joined(bed) == (None, None)
        await bed.ask(call("w2"))
        assert joined(bed) == (None, None)


@pytest.mark.parametrize("url", ["redis://127.0.0.1:1/0", None])
async def test_without_redis_the_deadline_counts_from_the_request(url):
    async with gateway(url="redis://127.0.0.1:1/0") as bed:
        if url is None:
            bed.gateway.workflows.board = None
        assert (await bed.ask(call(workflow_deadline=10))).status == 200
        step, deadline_s = joined(bed)
        assert (step["reason"], deadline_s) == ("workflow_alone", 10)
        assert (await bed.ask(call())).status == 200
        assert joined(bed) == (None, None)


async def test_a_redis_that_hangs_holds_nobody_up(monkeypatch):
    class Hanging:
        async def run(self, dialogue):
            await asyncio.sleep(60)

    async with gateway() as bed:
        bed.gateway.workflows = Workflows(Hanging())
        for _ in range(5):  # together within the time that the first alone waits for Redis, and a little
            assert (await asyncio.wait_for(bed.ask(call(workflow_deadline=10)), 2)).status == 200
            assert joined(bed)[0]["reason"] == "workflow_alone"
        figures = {name: value for name, _, _, value in status.gauges(bed.gateway)}
        assert figures["workflow_steps_alone_total"] == 5


async def test_after_a_redis_hung_each_request_is_counted_once(redis_server):
    """What it had received and not answered, it does when it goes on; the gateway tells it again meanwhile."""
    async with gateway() as bed:
        assert (await bed.ask(call(workflow_deadline=60))).status == 200
        with hanging(redis_server):
            for _ in range(5):
                assert (await bed.ask(call(workflow_deadline=60))).status == 200
                await asyncio.sleep(0.6)
        await until_on_loop(lambda: not bed.gateway.workflows.untold)
        found = live.run(read_workflow("acme", "w1"))
        assert (found.seen, found.answered, found.running) == (6, 6, 0)


@pytest.mark.parametrize(
    ("body", "field"),
    [
        (completion(workflow_deadline=5), "workflow_deadline"),
        (completion(workflow_steps_left=2), "workflow_steps_left"),
        (call(workflow_deadline=0), "workflow_deadline"),
        (call(workflow_deadline=-3), "workflow_deadline"),
        (call(workflow_deadline="soon"), "workflow_deadline"),
        (call(workflow_deadline=1e9), "workflow_deadline"),
        (call(workflow_deadline=5, workflow_steps_left=0), "workflow_steps_left"),
        (call(workflow_deadline=5, workflow_steps_left=10_000), "workflow_steps_left"),
        (call(workflow_deadline=5, workflow_steps_left=1.5), "workflow_steps_left"),
        (call(workflow_deadline=5, workflow_steps_left=True), "workflow_steps_left"),
        (call("w" * 200, workflow_deadline=5), "metadata.workflow_id"),
    ],
)
async def test_bad_input_names_its_field(body, field):
    async with gateway() as bed:
        answer = await bed.ask(body)
        assert answer.status == 400
        assert answer.error["param"] == field
        assert not live._client(settings.REDIS_URL).keys("slackline:workflows:*")


async def test_entitlements_bound_the_workflows_deadline_and_the_share_of_a_step():
    async with gateway(tightest_deadline_s=5.0) as bed:
        refused = await bed.ask(call(workflow_deadline=3))
        assert (refused.status, refused.error["param"]) == (403, "workflow_deadline")
        assert (await bed.ask(call(workflow_deadline=6, workflow_steps_left=3))).status == 200
        assert joined(bed)[1] == 5.0


async def test_a_flood_of_one_tenant_takes_redis_from_nobody():
    """Each request asks before it is queued, so that they must not take a connection each."""
    async with gateway() as bed:
        board, leased, over = bed.gateway.workflows.board, [], asyncio.Event()
        assert (await bed.ask(call("theirs", workflow_deadline=30), key=OTHER)).status == 200

        async def lease():
            while not over.is_set():
                leased.append(await board.lease("telemetry", 5.0))

        leasing = asyncio.create_task(lease())
        flood = [bed.ask(call(f"w{number}", workflow_deadline=30)) for number in range(400)]
        steps = [bed.ask(call("theirs"), key=OTHER) for _ in range(20)]
        answers = await asyncio.gather(*flood, *steps)
        over.set()
        await leasing
        assert len(leased) > 5
        assert {answer.status for answer in answers} == {200}
        found = [
            step["reason"] for record in bed.sink.records for step in record.decisions if step["kind"] == "workflow"
        ]
        assert Counter(found) == {"workflow_began": 401, "workflow_inherited": 20}


async def test_asks_of_tenants_take_turns():
    class Redis:
        def __init__(self):
            self.asked = []

        async def run(self, dialogue):
            command = dialogue.send(None)
            self.asked.append([key.decode() if isinstance(key, bytes) else key for key in command[3 : 3 + command[2]]])
            await asyncio.sleep(0)
            try:
                dialogue.send([None] * command[2] + [b"1.000000"])
            except StopIteration as end:
                return end.value

    redis, asks = Redis(), Workflows()
    asks.board = redis
    asked = SimpleNamespace(workflow_deadline=None, workflow_steps_left=None)
    model = SimpleNamespace(name="demo")
    own = {"stage": "", "step": None, "parents": None}
    parsed = SimpleNamespace(workflow="w", model=model, prompt_tokens=5, asked=asked, **own)
    await asyncio.gather(*(asks.time_of(parsed, tenant) for tenant in ["loud"] * 300 + ["quiet"]))
    assert sum(map(len, redis.asked)) == 301
    assert WORKFLOWS_KEY.format(tenant="quiet") in redis.asked[0]
    assert max(map(len, redis.asked)) == AT_ONCE


async def test_a_request_over_its_quota_begins_no_workflow():
    async with gateway() as bed:
        (acme, other) = bed.gateway.snapshot.tenants
        bed.gateway.configure(replace(bed.gateway.snapshot, tenants=(replace(acme, rpm=1), other)))
        assert (await bed.ask(call("w1", workflow_deadline=10))).status == 200
        assert (await bed.ask(call("w2", workflow_deadline=10))).status == 429
        assert live._client(settings.REDIS_URL).zrange("slackline:workflows:acme", 0, -1) == [b"w1"]


async def test_a_tenant_has_a_bounded_number_of_open_workflows(monkeypatch):
    monkeypatch.setattr(workflows, "MOST_OPEN", 2)
    async with gateway() as bed:
        for name in ("w1", "w2"):
            assert (await bed.ask(call(name, workflow_deadline=10))).status == 200
        answer = await bed.ask(call("w3", workflow_deadline=10))
        assert (answer.status, answer.error["param"]) == (429, "workflow_deadline")
        assert (await bed.ask(call("w1", workflow_deadline=10))).status == 200  # those that are open go on
        assert (await bed.ask(call("w3", workflow_deadline=10), key=OTHER)).status == 200
        (due,) = [live._client(settings.REDIS_URL).zscore("slackline:workflows:acme", "w1")]
        live._client(settings.REDIS_URL).zadd("slackline:workflows:acme", {"w1": due - 11})  # late by a second
        assert (await bed.ask(call("w1", workflow_deadline=10))).status == 200
        assert joined(bed)[0]["reason"] == "workflow_late", "as long as there is room"
        assert (await bed.ask(call("w3", workflow_deadline=10))).status == 200, "late ones make room"
        assert (await bed.ask(call("w4", workflow_deadline=10))).status == 429


async def test_ten_thousand_steps_of_one_workflow_take_bounded_memory_and_the_next_one_is_served():
    name = WORKFLOWS_KEY.format(tenant="acme")
    client = live._client(settings.REDIS_URL)
    for first in range(0, 10_000, AT_ONCE):
        steps = [workflows.StepOfWorkflow("acme", "w1", 60.0, 1, 5, name=f"s{first + at}") for at in range(AT_ONCE)]
        live.run(workflows.run_orders(steps, "gw", first + 1))
    assert client.zcard(name) == 1
    assert 0 < client.ttl(name) <= 86400 + 3600
    used = sum(client.memory_usage(key) for key in client.keys("slackline:workflows:*"))
    assert used < 30_000, used
    async with gateway() as bed:
        assert (await bed.ask(call(workflow_deadline=60))).status == 200
        assert joined(bed)[0]["reason"] == "workflow_inherited"
