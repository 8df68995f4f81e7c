"""`/api/v1/workflow-results`: ended workflows one by one, for roles and a tenant's own key."""

from __future__ import annotations

import time

import pytest

from tests import factories

pytestmark = [pytest.mark.db, pytest.mark.usefixtures("db")]
MISS = {"ttft_met": False, "attained": False, "goodput_tokens": 0}


@pytest.fixture
def workflows(tenant) -> None:
    now = time.time()

    def call(workflow, ago_s, of=tenant.name, left_s=5.0, last=None, **fields):
        step = {"kind": "workflow", "reason": "workflow_inherited", "at": 0.0, "figures": {"left_s": left_s}}
        decisions = [step, last] if last else [step]
        at = {"arrived_at": now - ago_s, "e2e_s": 1.0}
        return factories.record(tenant=of, workflow=workflow, decisions=decisions, **at, **fields)

    hung_up = {"kind": "cancel", "reason": "workflow_cancelled"}
    factories.records_stored(
        call("kept", 30), call("kept", 29, left_s=4.0), call("late", 60, left_s=0.5),
        call("left", 90, last=hung_up, outcome="cancelled", **MISS), call("theirs", 40, of="globex"),
        call("open", 30, left_s=600.0), call("old", 100_000, **MISS, outcome="failed"),
    )  # fmt: skip


def names(caller, **query):
    answer = caller.get("/workflow-results", **query)
    assert answer.status_code == 200, answer.data
    return [row["workflow_id"] for row in answer.data["items"]]


def test_what_has_ended_in_a_day_is_listed_the_last_first(viewer, workflows):
    assert names(viewer) == ["kept", "theirs", "late", "left"]
    assert names(viewer, since="2020-01-01T00:00:00Z")[-1] == "old"
    assert names(viewer, until="2020-01-01T00:00:00Z") == []


@pytest.mark.parametrize(
    ("result", "found"), [("in_time", ["kept", "theirs"]), ("missed", ["late"]), ("cancelled", ["left"])]
)
def test_by_result(viewer, workflows, result, found):
    answer = viewer.get("/workflow-results", result=result)
    assert [(row["workflow_id"], row["result"]) for row in answer.data["items"]] == [(name, result) for name in found]


def test_a_row_has_what_its_requests_add_up_to(viewer, tenant, workflows):
    (row,) = viewer.get("/workflow-results", workflow_id="kept").data["items"]
    assert (row["tenant"], row["requests"], row["failed"], row["missed"], row["tokens"]) == (tenant.name, 2, 0, 0, 240)
    assert row["late_s"] == pytest.approx(-3.0, abs=0.01)
    assert names(viewer, tenant="globex", slo_class="interactive") == ["theirs"]
    assert names(viewer, slo_class="") == []


def test_pages_follow_each_other(viewer, workflows):
    first = viewer.get("/workflow-results", limit=3).data
    assert [row["workflow_id"] for row in first["items"]] == ["kept", "theirs", "late"]
    assert names(viewer, limit=3, cursor=first["next_cursor"]) == ["left"]


def test_a_key_sees_its_own_alone(tenant_key, workflows):
    assert names(tenant_key) == ["kept", "late", "left"]
    assert names(tenant_key, tenant="globex") == []


@pytest.mark.parametrize("query", [{"result": "both"}, {"since": "soon"}, {"tenant": "x" * 65}, {"cursor": "?"}])
def test_a_wrong_query_names_its_field(viewer, query):
    answer = viewer.get("/workflow-results", **query)
    assert answer.status_code == 400
    assert next(iter(query)) in str(answer.data)
