"""`/api/v1/workflows`: what records and gateways know of workflows, for roles and tenants' keys; cancelling."""

from __future__ import annotations

import time

import pytest
from django.conf import settings
from django.utils import timezone

from controller.models import Decision, WorkflowResult
from controller.selectors.records.goodput import result_of
from tests import factories
from workers import live
from workers.workflows import (
    BY_TENANT,
    CountRequests,
    OpenWorkflow,
    ReportTool,
    cancel_workflow,
    cancellations,
    read_workflow,
    run_orders,
)

pytestmark = [pytest.mark.db, pytest.mark.django_db]


@pytest.fixture(autouse=True)
def board(redis_server):
    live._client(settings.REDIS_URL).flushdb()


@pytest.fixture
def no_redis(monkeypatch, settings):
    settings.REDIS_URL = "redis://127.0.0.1:1/0"


def call(workflow, ago_s, took_s=1.0, left_s=None, **fields):
    figures = {"left_s": left_s, "steps_left": 2, "step_s": (left_s or 0) / 2}
    step = {"kind": "workflow", "reason": "workflow_inherited", "at": 0.0, "figures": figures}
    decisions = [step] if left_s is not None else []
    return factories.record(
        workflow=workflow, arrived_at=time.time() - ago_s, e2e_s=took_s, decisions=decisions, **fields
    )


def begin(name, tenant="acme", deadline_s=60.0):
    live.run(run_orders([OpenWorkflow(tenant, name, deadline_s)]))


def listed(caller, **query):
    answer = caller.get("/workflows", **query)
    assert answer.status_code == 200, answer.data
    return answer.data


def names(caller, **query):
    return [each["workflow_id"] for each in listed(caller, **query)["items"]]


def test_records_and_what_gateways_keep_are_one_list(viewer, tenant):
    begin("open", tenant.name, deadline_s=600.0)
    begin("unused", tenant.name, deadline_s=600.0)
    live.run(run_orders([CountRequests(tenant.name, "open", 3, 1, 0, 7, 0.1)]))
    own = {"tenant": tenant.name}
    factories.records_stored(
        call("open", 1, left_s=600, stage="plan", output_tokens=7, **own),
        call("late", 100, took_s=20, left_s=10, **own), call("free", 50, **own),
        call("kept", 200, left_s=20, **own),
    )  # fmt: skip
    rows = {each["workflow_id"]: each for each in listed(viewer)["items"]}
    assert {name: row["state"] for name, row in rows.items()} == {
        "open": "open", "unused": "open", "late": "late", "free": "no_deadline", "kept": "late",
    }  # fmt: skip
    assert {name: row["in_time"] for name, row in rows.items()} == {
        "open": True, "unused": True, "late": False, "free": None, "kept": True,
    }  # fmt: skip
    open_ = rows["open"]
    assert (open_["requests"], open_["running"], open_["output_tokens"], open_["stages"]) == (1, 2, 7, ["plan"])
    assert 540 < open_["left_s"] < 600
    assert rows["free"]["due_at"] is None
    assert names(viewer, state="late") == ["late", "kept"]
    assert names(viewer, tenant="nobody") == []


def test_a_workflow_that_is_due_while_requests_run_is_missed(viewer, tenant):
    own = tenant.name
    begin("runs", own, 0.05)
    live.run(run_orders([CountRequests(own, "runs", 2, 1, 0, 7, 0.0)]))
    factories.records_stored(call("runs", 5, left_s=5.5, tenant=own))
    time.sleep(0.1)
    (row,) = listed(viewer)["items"]
    assert (row["state"], row["in_time"], row["running"]) == ("late", False, 1)


def test_pages_follow_each_other_without_gaps(viewer):
    factories.records_stored(*(call(f"w{number:02}", 10 + number) for number in range(7)))
    first = listed(viewer, limit=3)
    factories.records_stored(call("newer", 1))
    second = listed(viewer, limit=3, cursor=first["next_cursor"])
    third = listed(viewer, limit=3, cursor=second["next_cursor"])
    found = [each["workflow_id"] for page in (first, second, third) for each in page["items"]]
    assert found == [f"w{number:02}" for number in range(7)]
    assert third["next_cursor"] is None
    for wrong in ("x", "bnVsbA", "WzEsMl0", "W3RydWUsImEiLCJiIl0"):
        answer = viewer.get("/workflows", cursor=wrong)
        assert (answer.status_code, answer.data["error"]["code"]) == (400, "invalid_cursor")


def test_one_shows_its_requests_in_order_with_their_shares(viewer):
    begin("w/1?x", "acme")
    factories.records_stored(
        call("w/1?x", 30, took_s=4.0, left_s=60, id="a", stage="plan", step_key="plan"),
        call("w/1?x", 20, took_s=2.0, left_s=40, id="b", outcome="cut", attained=False, parents=["plan"]),
        call("other", 10),
    )  # fmt: skip
    answer = viewer.get("/workflows/by-id", tenant="acme", workflow_id="w/1?x")
    assert answer.status_code == 200, answer.data
    assert [(each["id"], each["left_s"], each["share_s"], each["took_s"]) for each in answer.data["items"]] == [
        ("a", 60, 30, 4), ("b", 40, 20, 2),
    ]  # fmt: skip
    assert answer.data["tool_steps"] == []
    assert [(each["step_key"], each["parents"]) for each in answer.data["items"]] == [("plan", None), ("", ["plan"])]
    assert (answer.data["more"], answer.data["in_time"], answer.data["failed"]) == (False, False, 1)
    for wrong in ({"tenant": "acme", "workflow_id": "none"}, {"tenant": "other", "workflow_id": "w/1?x"}):
        assert viewer.get("/workflows/by-id", **wrong).status_code == 404
    assert "tenant" in viewer.get("/workflows/by-id", workflow_id="w").data["error"]["fields"]


def test_tool_steps_come_from_records_and_from_what_gateways_keep(viewer):
    begin("w", "acme")
    live.run(run_orders([ReportTool("acme", "w", "t2", "browse", 1.0, 0.0, None)]))
    tool = {"key": "t1", "name": "search", "began": time.time() - 12, "ended": time.time() - 10, "parents": ["p"]}
    factories.records_stored(call("w", 20, id="p"), call("w", 9, id="q", parents=["t1"], tool_steps=[tool]))
    found = viewer.get("/workflows/by-id", tenant="acme", workflow_id="w").data["tool_steps"]
    assert [(each["key"], each["name"], each["parents"]) for each in found] == [
        ("t1", "search", ["p"]), ("t2", "browse", None),
    ]  # fmt: skip
    assert [round(each["took_s"]) for each in found] == [2, 1]


def test_a_tenants_key_sees_its_own(tenant, tenant_key):
    own = tenant.name
    factories.records_stored(call("mine", 10, tenant=own), call("theirs", 9, tenant="somebody"))
    begin("ours", own)
    begin("open-there", "somebody")
    assert sorted(names(tenant_key)) == ["mine", "ours"]
    assert names(tenant_key, tenant="somebody") == []
    assert tenant_key.get("/workflows/by-id", workflow_id="mine").status_code == 200
    for name in ("theirs", "open-there"):
        answer = tenant_key.get("/workflows/by-id", workflow_id=name, tenant="somebody")
        assert answer.status_code == 404


def test_without_redis_records_alone_are_shown(viewer, no_redis):
    factories.records_stored(call("w", 10, left_s=60))
    assert names(viewer) == ["w"]
    assert viewer.get("/workflows/by-id", tenant="acme", workflow_id="w").data["running"] == 0


def test_an_operator_cancels_and_it_is_audited_once(operator):
    begin("w1")
    live.run(run_orders([CountRequests("acme", "w1", 2, 1, 0, 7, 0.1)]))
    body = {"tenant": "acme", "workflow_id": "w1"}
    answer = operator.post("/workflows/cancel", body)
    assert answer.status_code == 200, answer.data
    decision = Decision.objects.get(kind="workflow_cancel")
    assert answer.data == {"cancelled_by": "operator", "running": 1, "decision": decision.pk}
    assert (decision.actor, decision.subject_type, decision.subject) == (operator.user.username, "workflow", "w1")
    assert (decision.inputs, decision.outcome["running"]) == ({"tenant": "acme"}, 1)
    assert [each.workflow for each in live.run(cancellations("0-0"))] == ["w1"]
    assert operator.post("/workflows/cancel", body).data["decision"] is None
    assert Decision.objects.filter(kind="workflow_cancel").count() == 1
    assert live.run(read_workflow("acme", "w1")).cancelled_by == "operator"


def test_one_that_an_operator_cancels_while_nothing_of_it_runs_is_missed(operator):
    """It was in time: no record said that it was cancelled."""
    began_at = timezone.now()
    for name in ("w1", "unused"):
        begin(name)
    factories.records_stored(call("w1", 5, left_s=64))
    for name in ("w1", "unused", "w1"):
        assert operator.post("/workflows/cancel", {"tenant": "acme", "workflow_id": name}).status_code == 200
    live.run(cancel_workflow("acme", "w1", BY_TENANT))
    for name, requests in (("w1", 1), ("unused", 0)):
        row = WorkflowResult.objects.get(workflow=name)
        assert (result_of(row), row.cancelled_by, row.requests) == ("missed", "operator", requests)
        assert began_at <= row.ends_at <= timezone.now()


def test_one_that_is_cancelled_after_its_deadline_keeps_its_result(operator):
    begin("w1", deadline_s=0.05)
    factories.records_stored(call("w1", 5, left_s=5))
    time.sleep(0.1)
    assert operator.post("/workflows/cancel", {"tenant": "acme", "workflow_id": "w1"}).status_code == 200
    row = WorkflowResult.objects.get()
    assert (result_of(row), row.cancelled_by) == ("in_time", "")


def test_one_that_its_client_cancelled_stays_its_clients(operator):
    begin("w1")
    live.run(cancel_workflow("acme", "w1", BY_TENANT))
    answer = operator.post("/workflows/cancel", {"tenant": "acme", "workflow_id": "w1"})
    assert (answer.data["cancelled_by"], answer.data["decision"]) == ("tenant", None)


def test_what_gateways_do_not_keep_cannot_be_cancelled(operator):
    factories.records_stored(call("free", 10))
    answer = operator.post("/workflows/cancel", {"tenant": "acme", "workflow_id": "free"})
    assert answer.status_code == 404
    assert not Decision.objects.filter(kind="workflow_cancel").exists()
    assert operator.post("/workflows/cancel", {"tenant": "acme"}).data["error"]["fields"].keys() == {"workflow_id"}


def test_an_attempt_without_redis_is_audited(operator, no_redis):
    answer = operator.post("/workflows/cancel", {"tenant": "acme", "workflow_id": "w1"})
    assert (answer.status_code, answer.data["error"]["code"]) == (503, "live_data_unavailable")
    assert "error" in Decision.objects.get(kind="workflow_cancel").outcome
