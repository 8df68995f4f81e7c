"""`/api/v1/goodput`: by type, tenant, class and minute, for roles and a tenant's own key."""

from __future__ import annotations

import time
from datetime import UTC, datetime, timedelta

import pytest

from controller.models import WorkflowResult
from tests import factories

pytestmark = [pytest.mark.db, pytest.mark.usefixtures("db")]
MISS = {"ttft_met": False, "attained": False, "goodput_tokens": 0}


@pytest.fixture
def traffic(tenant) -> None:
    step = {"kind": "workflow", "reason": "workflow_inherited", "at": 0.0, "figures": {"left_s": 5}}
    now = time.time()
    factories.records_stored(
        factories.record(tenant=tenant.name, arrived_at=now - 30),
        factories.record(tenant=tenant.name, arrived_at=now - 30, **MISS),
        factories.record(tenant="globex", arrived_at=now - 600, target_deadline_s=9.0, goodput_tokens=120),
        factories.record(tenant="globex", arrived_at=now - 600, workflow="w", decisions=[step]),
        factories.record(tenant="globex", arrived_at=now - 599, workflow="w"),
    )


def rows(caller, **query):
    answer = caller.get("/goodput", **query)
    assert answer.status_code == 200, answer.data
    return answer.data["items"]


def test_by_type_over_the_last_hour(viewer, traffic):
    found = {row["type"]: row for row in rows(viewer)}
    assert set(found) == {"latency", "deadline", "compound"}
    assert (found["latency"]["share"], found["latency"]["token_share"]) == (0.5, 0.5)
    assert (found["compound"]["finished"], found["compound"]["in_time"]) == (1, 1)
    assert (found["compound"]["goodput_tokens"], found["deadline"]["goodput_tokens"]) == (240, 120)
    assert found["latency"]["tenant"] is found["latency"]["minute"] is None


def test_fewer_minutes_leave_out_what_is_older(viewer, traffic):
    assert [row["type"] for row in rows(viewer, minutes=5)] == ["latency"]


def test_by_tenant_and_by_minute(viewer, tenant, traffic):
    by_tenant = [(row["tenant"], row["type"]) for row in rows(viewer, by="tenant")]
    assert by_tenant == sorted([(tenant.name, "latency"), ("globex", "compound"), ("globex", "deadline")])
    assert all(row["minute"] for row in rows(viewer, by="minute"))
    assert {row["slo_class"] for row in rows(viewer, by="slo_class")} == {"interactive"}


def test_a_day_has_rows_of_a_quarter_of_an_hour(viewer, tenant):
    now = time.time()
    factories.records_stored(*(factories.record(arrived_at=now - ago) for ago in (4 * 3600, 4 * 3600 + 1_000)))
    assert rows(viewer) == []
    found = rows(viewer, minutes=1440, by="minute")
    assert [(row["type"], row["finished"]) for row in found] == [("latency", 1)] * 2
    first, second = (datetime.fromisoformat(row["minute"]) for row in found)
    assert second - first in (timedelta(minutes=15), timedelta(minutes=30))


def test_a_key_sees_its_own_alone(tenant, tenant_key, traffic):
    assert [(row["tenant"], row["type"]) for row in rows(tenant_key, by="tenant")] == [(tenant.name, "latency")]
    assert rows(tenant_key, tenant="globex") == []


@pytest.mark.parametrize("query", [{"minutes": 0}, {"minutes": 1441}, {"by": "id"}, {"tenant": "x" * 65}])
def test_a_wrong_query_names_its_field(viewer, query):
    answer = viewer.get("/goodput", **query)
    assert answer.status_code == 400
    assert next(iter(query)) in str(answer.data)


@pytest.mark.parametrize(("kind", "number"), [("latency", 2), ("deadline", 1), ("compound", 2), ("best_effort", 0)])
def test_requests_are_listed_by_type(viewer, traffic, kind, number):
    answer = viewer.get("/requests", type=kind)
    assert len(answer.data["items"]) == number
    assert {viewer.get(f"/requests/{row['id']}").data["type"] for row in answer.data["items"]} <= {kind}


def test_an_unknown_type_is_refused(viewer):
    assert viewer.get("/requests", type="slow").status_code == 400


def staged(tenant, workflow, stage, share_s, took_s, **fields):
    figures = {"left_s": 60.0, "step_s": share_s}
    step = {"kind": "workflow", "reason": "workflow_inherited", "at": 0.0, "figures": figures}
    own = {"tenant": tenant, "workflow": workflow, "stage": stage, "e2e_s": took_s}
    return factories.record(**own, arrived_at=time.time() - 30, decisions=[step], **fields)


@pytest.fixture
def stages(tenant) -> None:
    cancelled = {"outcome": "cancelled", "attained": False, "goodput_tokens": 0}
    factories.records_stored(
        staged(tenant.name, "w1", "plan", 2.0, 1.0, prompt_tokens=100, output_tokens=20),
        staged(tenant.name, "w1", "write", 2.0, 3.0, prompt_tokens=100, output_tokens=20),
        staged(tenant.name, "w2", "plan", 2.0, 1.0, prompt_tokens=50, output_tokens=5),
        staged(tenant.name, "w2", "write", 2.0, 1.0, outcome="cut", attained=False, prompt_tokens=50, output_tokens=5),
        staged("globex", "w3", "plan", 2.0, 1.0, **cancelled),
        factories.record(tenant="globex", arrived_at=time.time() - 30),
    )
    WorkflowResult.objects.update(due_at=datetime.fromtimestamp(time.time() - 1, UTC))


def test_by_stage_a_workflow_counts_as_a_whole_and_a_share_by_itself(viewer, tenant, stages):
    answer = viewer.get("/goodput/stages")
    assert answer.status_code == 200, answer.data
    found = {(row["tenant"], row["stage"]): row for row in answer.data["items"]}
    plan, write = found[tenant.name, "plan"], found[tenant.name, "write"]
    assert (plan["workflows"], plan["requests"], plan["answered"], plan["in_share"]) == (2, 2, 2, 2)
    assert (plan["tokens"], plan["goodput_tokens"]) == (175, 120)
    assert (write["answered"], write["shared"], write["in_share"], write["goodput_tokens"]) == (1, 2, 0, 120)


def test_a_key_sees_the_stages_of_its_own_workflows_alone(tenant, tenant_key, stages):
    items = tenant_key.get("/goodput/stages").data["items"]
    assert {row["tenant"] for row in items} == {tenant.name}
    assert tenant_key.get("/goodput/stages", tenant="globex").data["items"] == []


@pytest.mark.parametrize("query", [{"minutes": 0}, {"minutes": 61}, {"tenant": "x" * 65}])
def test_a_wrong_query_of_stages_names_its_field(viewer, query):
    answer = viewer.get("/goodput/stages", **query)
    assert answer.status_code == 400
    assert next(iter(query)) in str(answer.data)
