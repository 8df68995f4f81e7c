"""`/v1/workflows` through two gateways and a real Redis: begun, read, cancelled, and what is refused."""

from __future__ import annotations

import asyncio
import json
import time
from dataclasses import replace

import pytest
from django.conf import settings

from api.openai.protocol.workflow_bodies import MOST_STAGE_CHARS, MOST_STAGES
from tests.api.openai.gateways import completion, key_config
from tests.api.openai.workflow_gateways import OTHER, call, config, gateway
from tests.waiting import until_on_loop
from workers import live, workflows
from workers.backends.fake import Script
from workers.workflows import BY_OPERATOR, BY_TENANT, cancel_workflow, open_workflows, read_workflow

pytestmark = pytest.mark.db
AWAY = "redis://127.0.0.1:1/0"
STAGES = [{"name": "plan"}, {"name": "search", "share": 2}, {"name": "write"}]


@pytest.fixture(autouse=True)
def empty(redis_server):
    live._client(settings.REDIS_URL).flushdb()


def begin(bed, **fields):
    key = fields.pop("key", None)
    return bed.ask({"deadline": 60, **fields}, "/v1/workflows", **({"key": key} if key else {}))


def read(bed, name="w1", **more):
    return bed.ask(b"", f"/v1/workflows/{name}", method="GET", **more)


def cancel(bed, name="w1", **more):
    return bed.ask(b"", f"/v1/workflows/{name}/cancel", **more)


def shown(answer):
    return json.loads(answer.body)


def of_workflow(record):
    return next(step for step in record.decisions if step["kind"] == "workflow")


# ---- how often ------------------------------------------------------------------------------------------------------


async def test_a_tenant_reads_cancels_and_forgets_at_a_bounded_rate(monkeypatch):
    """Whoever polls too often is told when to come again; its requests and steps go on."""
    monkeypatch.setattr("api.openai.tenants.CALLS_A_MINUTE", 2)
    async with gateway() as bed:
        await begin(bed, id="w1")
        assert [(await read(bed)).status for _ in range(2)] == [200, 200]
        below = (("", "GET"), ("/cancel", "POST"), ("/steps", "DELETE"), ("/branches/b1", "DELETE"))
        for rest, method in below:
            refused = await bed.ask(b"", f"/v1/workflows/w1{rest}", method=method)
            assert (refused.status, refused.error["code"]) == (429, "rate_limit_exceeded"), rest
            assert 1 <= int(refused.headers["retry-after"]) <= 30
        assert (await bed.ask(completion(metadata={"workflow_id": "w1"}))).status == 200


# ---- begun and read -------------------------------------------------------------------------------------------------


async def test_one_that_was_begun_at_one_gateway_is_shared_at_another_and_read_at_both():
    async with gateway("gw-a") as one, gateway("gw-b") as two:
        begun = await begin(one, id="w1", deadline=20)
        assert begun.status == 201
        assert shown(begun) | {"created_at": 0, "deadline_left": 20} == {
            "id": "w1", "object": "workflow", "state": "open", "created_at": 0, "deadline": 20.0, "deadline_left": 20,
            "cancelled_at": None, "cancelled_by": None, "requests": 0, "answered": 0, "failed": 0, "running": 0,
            "output_tokens": 0, "goodput_tokens": 0, "in_time": True, "stages": [],
        }  # fmt: skip
        two.every(Script(tokens=3))
        assert (await two.ask(call())).status == 200
        record = two.sink.records[-1]
        assert of_workflow(record)["reason"] == "workflow_inherited"
        assert 19 < record.target_deadline_s < 20
        at_once = shown(await read(two))  # the gateway that served it tells before it reads
        assert (at_once["requests"], at_once["answered"], at_once["output_tokens"]) == (1, 1, 3)
        elsewhere = shown(await read(one))
        assert elsewhere | {"deadline_left": 0} == at_once | {"deadline_left": 0}
        assert (elsewhere["goodput_tokens"], elsewhere["in_time"]) == (3, True)


async def test_what_runs_and_what_failed_is_told_and_a_failure_leaves_no_goodput():
    async with gateway("gw-a") as one, gateway("gw-b") as two:
        await begin(one, id="w1")
        await one.ask(call())
        one.every(Script(hang_after=1))
        running = one.send(call(stream=True))
        await until_on_loop(lambda: one.backend("e1").running + one.backend("e2").running)
        told = shown(await read(one))
        assert (told["requests"], told["answered"], told["running"], told["in_time"]) == (2, 1, 1, True)
        await running.hang_up()
        await until_on_loop(lambda: len(one.sink.records) == 2)
        await asyncio.sleep(0.4)
        told = shown(await read(two))
        assert (told["requests"], told["failed"], told["running"]) == (2, 1, 0)
        assert (told["output_tokens"], told["goodput_tokens"], told["in_time"]) == (4, 0, False)


async def test_a_late_answer_leaves_no_goodput():
    async with gateway() as bed:
        await begin(bed, id="w1", deadline=0.3)
        await bed.ask(call())
        assert shown(await read(bed))["goodput_tokens"] == 4
        bed.every(Script(first_delay_s=0.5))
        await bed.ask(call())
        told = shown(await read(bed))
        assert (told["state"], told["answered"], told["in_time"], told["goodput_tokens"]) == ("late", 2, False, 0)
        assert told["deadline_left"] < 0


async def test_a_workflow_whose_answers_all_came_in_time_stays_in_time():
    async with gateway() as bed:
        await begin(bed, id="w1", deadline=0.4)
        await bed.ask(call())
        await begin(bed, id="unused", deadline=0.4)
        await asyncio.sleep(0.5)
        assert shown(await read(bed))["in_time"] is True
        assert shown(await read(bed, "unused"))["in_time"] is False


async def test_one_that_a_request_began_is_read_too():
    async with gateway() as bed:
        await bed.ask(call("from/a request", workflow_deadline=30))
        told = shown(await read(bed, "from/a request"))
        assert (told["deadline"], told["requests"], told["answered"]) == (30, 1, 1)


async def test_without_an_id_it_gets_one():
    async with gateway() as bed:
        first, second = shown(await begin(bed)), shown(await begin(bed))
        assert first["id"] != second["id"]
        assert shown(await read(bed, first["id"]))["deadline"] == 60


async def test_beginning_again_changes_nothing_and_otherwise_is_refused():
    async with gateway("gw-a") as one, gateway("gw-b") as two:
        first = await begin(one, id="w1", stages=STAGES)
        await asyncio.sleep(0.1)
        again = await begin(two, id="w1", stages=STAGES)
        assert (first.status, again.status) == (201, 200)
        assert shown(again)["created_at"] == shown(first)["created_at"]
        for other in ({"deadline": 61, "stages": STAGES}, {"stages": STAGES[1:]}, {}):
            refused = await begin(two, id="w1", **other)
            assert (refused.status, refused.error["code"], refused.error["param"]) == (409, "workflow_exists", "id")
            assert refused.headers["x-should-retry"] == "false"


async def test_stages_divide_the_time_that_is_left_by_their_shares():
    async with gateway() as bed:
        begun = shown(await begin(bed, id="w1", deadline=40, stages=STAGES))
        assert [each["deadline"] for each in begun["stages"]] == [
            pytest.approx(10, abs=0.1), pytest.approx(26.7, abs=0.1), pytest.approx(40, abs=0.1),
        ]  # fmt: skip
        got = {}
        for stage in ("plan", "search", "write", "elsewhere"):
            await bed.ask(completion(metadata={"workflow_id": "w1", "stage": stage}))
            got[stage] = bed.sink.records[-1]
        deadlines = {stage: record.target_deadline_s for stage, record in got.items()}
        assert deadlines == {
            "plan": pytest.approx(10, abs=0.5), "search": pytest.approx(26.7, abs=0.5),
            "write": pytest.approx(40, abs=0.5), "elsewhere": pytest.approx(40, abs=0.5),
        }  # fmt: skip
        assert of_workflow(got["plan"])["figures"]["steps_left"] == 3
        await bed.ask(completion(metadata={"workflow_id": "w1", "stage": "write"}, workflow_steps_left=4))
        assert bed.sink.records[-1].target_deadline_s == pytest.approx(10, abs=0.5), (
            "the request's own word comes first"
        )


# ---- refused --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({}, "deadline"),
        ({"deadline": 0}, "deadline"),
        ({"deadline": -1}, "deadline"),
        ({"deadline": "soon"}, "deadline"),
        ({"deadline": 1e9}, "deadline"),
        ({"deadline": True}, "deadline"),
        ({"deadline": 5, "id": ""}, "id"),
        ({"deadline": 5, "id": 7}, "id"),
        ({"deadline": 5, "id": "w" * 121}, "id"),
        ({"deadline": 5, "priority": 0}, "priority"),
        ({"deadline": 5, "stages": []}, "stages"),
        ({"deadline": 5, "stages": {}}, "stages"),
        ({"deadline": 5, "stages": [{"name": f"s{number}"} for number in range(MOST_STAGES + 1)]}, "stages"),
        ({"deadline": 5, "stages": [{"name": f"{n:0120}"} for n in range(MOST_STAGE_CHARS // 120 + 1)]}, "stages"),
        ({"deadline": 5, "stages": [{"name": "a"}, {"name": "a"}]}, "stages"),
        ({"deadline": 5, "stages": ["a"]}, "stages[0]"),
        ({"deadline": 5, "stages": [{"name": "a"}, {}]}, "stages[1].name"),
        ({"deadline": 5, "stages": [{"name": "a", "share": 0}]}, "stages[0].share"),
        ({"deadline": 5, "stages": [{"name": "a", "share": 1e9}]}, "stages[0].share"),
        ({"deadline": 5, "stages": [{"name": "a", "after": "b"}]}, "stages[0].after"),
    ],
)
async def test_bad_input_names_its_field(body, field):
    async with gateway() as bed:
        answer = await bed.ask(body, "/v1/workflows")
        assert (answer.status, answer.error["param"]) == (400, field)
        assert not live._client(settings.REDIS_URL).keys("slackline:workflows:*")


@pytest.mark.parametrize("raw", [b"", b"{", b"[]", b'{"deadline": NaN}', b"[" * 9000])
async def test_what_is_not_json_is_refused(raw):
    async with gateway() as bed:
        answer = await bed.ask(raw, "/v1/workflows")
        assert (answer.status, answer.error["code"]) == (400, "invalid_json")


@pytest.mark.parametrize("name", ["w" * 400, "é" * 5_000])
async def test_a_name_that_no_workflow_can_have_is_not_looked_for(name):
    below = (("GET", ""), ("POST", "/cancel"), ("POST", "/fork"), ("POST", "/steps"), ("DELETE", "/steps"),
             ("DELETE", "/branches/b"), ("DELETE", "/branches/" + name))  # fmt: skip
    async with gateway(url="redis://127.0.0.1:1/0") as bed:
        for method, path in below:
            answer = await bed.ask({}, f"/v1/workflows/{name}{path}", method=method)
            assert (answer.status, answer.error["code"]) == (404, "not_found"), (method, path)
            assert len(answer.body) < 500


async def test_a_body_that_is_too_large_is_not_read():
    async with gateway() as bed:
        answer = await begin(bed, id="x" * 20_000)
        assert answer.status == 413


async def test_methods_and_keys():
    async with gateway() as bed:
        for method, path in (("GET", ""), ("DELETE", "/w1"), ("POST", "/w1"), ("PUT", "/w1/cancel")):
            assert (await bed.ask(b"", f"/v1/workflows{path}", method=method)).status == 405
        for answer in (
            await begin(bed, key="sk-wrong"),
            await read(bed, key="sk-wrong"),
            await cancel(bed, key="sk-no"),
        ):
            assert (answer.status, answer.error["code"]) == (401, "invalid_api_key")


async def test_another_tenants_workflow_does_not_exist():
    async with gateway() as bed:
        await begin(bed, id="w1")
        for answer in (await read(bed, key=OTHER), await cancel(bed, key=OTHER), await read(bed, "w2")):
            assert (answer.status, answer.error["code"]) == (404, "not_found")
        assert shown(await read(bed))["state"] == "open"
        assert (await begin(bed, id="w1", deadline=5, key=OTHER)).status == 201
        assert shown(await read(bed))["deadline"] == 60


async def test_no_tenants_name_and_id_make_another_tenants_keys():
    """Tenants' names may have colons and slashes."""
    async with gateway() as bed:
        (acme, other) = bed.gateway.snapshot.tenants
        tenants = (acme, replace(other, name="acme:w1"))
        keys = (bed.gateway.snapshot.keys[0], key_config(OTHER, id=2, tenant="acme:w1"))
        bed.gateway.configure(replace(bed.gateway.snapshot, tenants=tenants, keys=keys))
        assert (await begin(bed, id="w1")).status == 201
        assert (await begin(bed, id="w1", key=OTHER)).status == 201
        assert (await begin(bed, id="w1:w1")).status == 201
        assert (await read(bed)).status == 200


async def test_entitlements_bound_the_deadline():
    async with gateway(tightest_deadline_s=5.0) as bed:
        refused = await begin(bed, id="w1", deadline=3)
        assert (refused.status, refused.error["param"]) == (403, "deadline")
        begun = await begin(bed, id="w1", deadline=6, stages=STAGES)
        assert shown(begun)["stages"][0]["deadline"] == 5.0


async def test_beginning_one_counts_as_a_request_of_the_quota():
    async with gateway() as bed:
        (acme, other) = bed.gateway.snapshot.tenants
        bed.gateway.configure(replace(bed.gateway.snapshot, tenants=(replace(acme, rpm=1), other)))
        assert (await begin(bed, id="w1")).status == 201
        refused = await begin(bed, id="w2")
        assert (refused.status, refused.error["code"]) == (429, "rate_limit_exceeded")
        assert "retry-after" in refused.headers
        assert (await read(bed, "w2")).status == 404
        assert (await cancel(bed)).status == 200, "with a quota that is used up one must still be able to stop"
        assert bed.gateway.quotas.active("acme") == 0


async def test_a_tenant_has_a_bounded_number_of_open_workflows(monkeypatch):
    monkeypatch.setattr(workflows, "MOST_OPEN", 2)
    async with gateway() as bed:
        assert (await begin(bed, id="w1")).status == 201
        assert (await bed.ask(call("w2", workflow_deadline=10))).status == 200
        refused = await begin(bed, id="w3")
        assert (refused.status, refused.error["param"]) == (429, "deadline")
        assert (await begin(bed, id="w3", key=OTHER)).status == 201
        assert (await cancel(bed)).status == 200
        assert (await begin(bed, id="w3")).status == 201, "one that is cancelled makes room"


async def test_ten_thousand_workflows_leave_nothing_but_bounded_entries(monkeypatch):
    monkeypatch.setattr(workflows, "MOST_OPEN", 5)
    async with gateway() as bed:
        for number in range(60):
            assert (await begin(bed, id=f"w{number}", deadline=0.001)).status == 201
    assert len(live._client(settings.REDIS_URL).keys("slackline:workflows:*")) <= 2 * 5 + 1


async def test_without_redis_it_says_so_and_requests_go_on():
    async with gateway(url=AWAY) as bed:
        for answer in (await begin(bed, id="w1"), await read(bed), await cancel(bed)):
            assert (answer.status, answer.error["code"]) == (503, "workflows_unavailable")
            assert answer.headers["retry-after"] == "1"
        assert (await bed.ask(call(workflow_deadline=5))).status == 200
        bed.gateway.workflows.board = None
        answer = await begin(bed, id="w1")
        assert (answer.status, "runs alone" in answer.error["message"]) == (503, True)


async def test_what_redis_missed_is_told_when_it_is_back():
    class Away:
        def __init__(self, board):
            self.board, self.away = board, False

        async def run(self, dialogue):
            if self.away:
                raise live.LiveUnavailable("away")
            return await self.board.run(dialogue)

    async with gateway() as bed:
        board = bed.gateway.workflows.board = Away(bed.gateway.workflows.board)
        await begin(bed, id="w1")
        await bed.ask(call())
        board.away = True
        assert (await bed.ask(call(workflow_deadline=5))).status == 200
        await asyncio.sleep(0.4)
        board.away = False
        await asyncio.sleep(1.2)
        told = shown(await read(bed))
        assert (told["requests"], told["answered"]) == (2, 2)


# ---- cancelled ------------------------------------------------------------------------------------------------------


async def test_cancelling_ends_what_waits_and_what_runs_at_both_gateways():
    found = config()
    (first, *_) = found.instances
    async with gateway("gw-a") as one, gateway("gw-b") as two:
        await begin(one, id="w1")
        for bed in (one, two):
            bed.gateway.configure(replace(found, instances=(replace(first, max_num_seqs=1),)))
            bed.every(Script(tokens=9, token_delay_s=5.0))
        running = [bed.send(call(stream=True)) for bed in (one, two)]
        for bed in (one, two):
            await until_on_loop(lambda bed=bed: bed.backend(first.id).running)
        waiting = [bed.send(call()) for bed in (one, two)]
        others = [two.send(call(), key=OTHER), two.send(completion())]
        await until_on_loop(lambda: len(two.gateway.scheduler.dispatcher.queue().ids()) == 3)
        await until_on_loop(lambda: all(client.answer.body for client in running))
        cancelled = await cancel(one)
        assert shown(cancelled)["state"] == "cancelled"
        assert shown(cancelled)["cancelled_by"] == "tenant"
        for client in waiting:
            answer = await client.done()
            assert (answer.status, answer.error["code"]) == (499, "cancelled")
            assert answer.error["message"] == "The workflow 'w1' was cancelled by its client."
        for client in running:
            answer = await client.done()
            assert answer.status == 200
            assert json.loads(answer.events[-1])["error"]["code"] == "cancelled"
        for bed in (one, two):
            assert len(bed.backend(first.id).aborted) == 1
            records = [record for record in bed.sink.records if record.tenant == "acme" and record.workflow == "w1"]
            assert {(record.outcome, record.error_code) for record in records} == {("cancelled", "cancelled")}
            assert {record.decisions[-1]["reason"] for record in records} == {"workflow_cancelled"}
        assert not any(client.answer.ended.is_set() for client in others)
        for client in others:
            await client.hang_up()


async def test_cancelling_again_changes_nothing_and_later_requests_are_refused():
    async with gateway("gw-a") as one, gateway("gw-b") as two:
        await begin(one, id="w1")
        await one.ask(call())
        first, again = await cancel(one), await cancel(two)
        assert first.status == again.status == 200
        assert shown(first)["cancelled_at"] == shown(again)["cancelled_at"]
        assert shown(again)["in_time"] is False
        assert shown(again)["deadline_left"] > 50, "when it was due is still told"
        for bed in (one, two):
            for body in (call(), call(workflow_deadline=30)):
                refused = await bed.ask(body)
                assert (refused.status, refused.error["code"]) == (499, "cancelled")
                assert refused.error["param"] == "metadata.workflow_id"
                assert refused.headers["x-should-retry"] == "false"
        assert (await begin(one, id="w1")).error["code"] == "workflow_exists"
        assert len(live._client(settings.REDIS_URL).xrange(workflows.CANCELLED_KEY)) == 1


async def test_a_cancellation_is_recorded_once_where_it_was_asked_for():
    async with gateway("gw-a") as one, gateway("gw-b") as two:
        began_at = time.time()
        await begin(one, id="w1")
        await one.ask(call())
        for _ in range(2):
            await cancel(one)
        await until_on_loop(lambda: two.gateway.workflows._cancelled)
        (told,) = one.sink.cancellations
        assert (told.tenant, told.workflow, told.by) == ("acme", "w1", "tenant")
        assert told.began_at == pytest.approx(began_at, abs=0.5)
        assert told.due_at == pytest.approx(told.began_at + 60, abs=0.001)
        assert told.began_at < told.cancelled_at <= time.time()
        assert [record.outcome for record in one.sink.records] == ["ok"]
        assert two.sink.cancellations == []


async def test_a_cancellation_whose_first_answer_was_lost_is_recorded_when_it_is_asked_for_again():
    async with gateway() as bed:
        await begin(bed, id="w1")
        live.run(cancel_workflow("acme", "w1", BY_TENANT))
        await until_on_loop(lambda: bed.gateway.workflows._cancelled)
        await cancel(bed)
        (told,) = bed.sink.cancellations
        assert told.by == BY_TENANT


async def test_an_operators_cancellation_stays_the_operators_when_the_client_cancels_too():
    async with gateway() as bed:
        await begin(bed, id="w1")
        live.run(cancel_workflow("acme", "w1", BY_OPERATOR))
        await cancel(bed)
        assert [told.by for told in bed.sink.cancellations] == [BY_OPERATOR]


async def test_a_request_whose_workflow_is_cancelled_while_it_asks_is_not_let_in():
    """It has asked Redis already when the gateway hears of the cancellation, and is not known to it yet."""
    async with gateway() as bed:
        await begin(bed, id="w1")
        asks, time_of = bed.gateway.workflows, bed.gateway.workflows.time_of

        async def late(parsed, tenant, name):
            found = await time_of(parsed, tenant, name)
            live.run(cancel_workflow("acme", "w1", BY_OPERATOR))
            await until_on_loop(lambda: asks._cancelled)
            return found

        asks.time_of = late
        answer = await bed.ask(call())
        assert (answer.status, answer.error["code"]) == (499, "cancelled")
        assert answer.error["message"].endswith("was cancelled by an operator.")


async def test_a_cancellation_before_a_gateway_looks_for_the_first_time_is_heard():
    """A request of the workflow may have been let in before that look."""
    async with gateway() as bed:
        await begin(bed, id="w1")
        live.run(cancel_workflow("acme", "w1", BY_OPERATOR))
        heard: list[tuple[str, str, str]] = []
        looks = asyncio.create_task(bed.gateway.workflows.watch(lambda *ended: heard.append(ended)))
        try:
            await until_on_loop(lambda: heard)
        finally:
            looks.cancel()
        assert heard == [("acme", "w1", BY_OPERATOR)]


async def test_an_operators_cancellation_reaches_gateways_that_were_away_from_redis_meanwhile():
    async with gateway() as bed:
        await begin(bed, id="w1")
        bed.every(Script(hang_after=1))
        running = bed.send(call())
        await until_on_loop(lambda: bed.backend("e1").running + bed.backend("e2").running)
        board = bed.gateway.workflows.board
        await board._redis.connection_pool.disconnect(inuse_connections=True)
        live.run(cancel_workflow("acme", "w1", BY_OPERATOR))
        answer = await running.done()
        assert (answer.status, answer.error["code"]) == (499, "cancelled")
        record = bed.sink.records[-1]
        assert (record.outcome, record.decisions[-1]["reason"]) == ("refused", "workflow_cancelled_by_operator")
        assert live.run(read_workflow("acme", "w1")).cancelled_by == BY_OPERATOR
        again = await cancel(bed)
        assert shown(again)["cancelled_by"] == "operator"


async def test_a_late_workflow_can_be_cancelled():
    async with gateway() as bed:
        await begin(bed, id="w1", deadline=0.1)
        await asyncio.sleep(0.2)
        assert shown(await cancel(bed))["state"] == "cancelled"
        assert bed.sink.cancellations == [], "it keeps the result that it had when it was due"


async def test_one_that_was_in_time_stays_so_when_it_is_cancelled_after_its_deadline():
    async with gateway() as bed:
        await begin(bed, id="w1", deadline=0.6)
        assert (await bed.ask(call())).status == 200
        await asyncio.sleep(0.8)
        told = shown(await cancel(bed))
        assert (told["state"], told["in_time"], told["goodput_tokens"] > 0) == ("cancelled", True, True)
        assert bed.sink.cancellations == []


async def test_those_that_are_open_are_listed_the_soonest_due_first():
    async with gateway() as bed:
        for name, deadline in (("late", 0.01), ("later", 90), ("soon", 30)):
            await begin(bed, id=name, deadline=deadline)
        await begin(bed, id="theirs", key=OTHER)
        await begin(bed, id="ended")
        await cancel(bed, "ended")
        await asyncio.sleep(0.05)
    assert live.run(open_workflows(["acme", "none", "other"])) == [
        ("acme", "soon"), ("acme", "later"), ("other", "theirs"),
    ]  # fmt: skip
