"""SLO classes: who may read and change them, and what is refused."""

import pytest

from controller.models import Decision, SLOClass
from tests import factories
from workers import live

pytestmark = [pytest.mark.db, pytest.mark.usefixtures("db")]

NEW = {"name": "interactive", "ttft_s": 1.0, "tpot_s": 0.1}


def test_an_operator_creates_a_class_and_the_audit_says_so(operator):
    answer = operator.post("/slo-classes", {**NEW, "target": 0.9})
    assert answer.status_code == 201, answer.data
    assert answer.data["target"] == 0.9
    assert answer.data["version"] == 1
    decision = Decision.objects.get(kind="slo_class_created")
    assert (decision.actor, decision.actor_type) == (operator.user.username, "person")
    assert decision.inputs["after"]["ttft_s"] == 1.0


def test_a_change_names_its_version_and_records_before_and_after(operator):
    row = factories.slo_class(ttft_s=1.0)
    answer = operator.patch(f"/slo-classes/{row.pk}", {"ttft_s": 2.0, "version": 1})
    assert answer.status_code == 200, answer.data
    assert (answer.data["ttft_s"], answer.data["version"]) == (2.0, 2)
    assert answer["ETag"] == '"2"'
    decision = Decision.objects.get(kind="slo_class_updated")
    assert decision.inputs == {"before": {"ttft_s": 1.0}, "after": {"ttft_s": 2.0}}
    assert decision.actor == operator.user.username


def test_the_second_of_two_savers_sees_the_conflict(operator):
    row = factories.slo_class()
    operator.patch(f"/slo-classes/{row.pk}", {"ttft_s": 2.0}, If_Match='"1"')
    answer = operator.patch(f"/slo-classes/{row.pk}", {"ttft_s": 3.0}, If_Match='"1"')
    assert answer.status_code == 412
    assert answer.data["error"]["code"] == "version_conflict"
    assert "version" in answer.data["error"]["fields"]
    row.refresh_from_db()
    assert row.ttft_s == 2.0


@pytest.mark.parametrize("headers", [{"If_Match": '"x"'}, {"If_Match": '"1", "2"'}, {"If_Match": '"99999999999"'}])
def test_a_change_without_a_usable_version_is_refused(operator, headers):
    row = factories.slo_class()
    answer = operator.patch(f"/slo-classes/{row.pk}", {"ttft_s": 2.0}, **headers)
    assert answer.status_code == 400
    assert "version" in answer.data["error"]["fields"]


def test_version_and_if_match_must_agree(operator):
    row = factories.slo_class()
    answer = operator.patch(f"/slo-classes/{row.pk}", {"ttft_s": 2.0, "version": 1}, If_Match='"2"')
    assert answer.status_code == 400


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"ttft_s": 0}, "ttft_s"),
        ({"ttft_s": -1}, "ttft_s"),
        ({"ttft_s": "soon"}, "ttft_s"),
        ({"ttft_s": None}, "ttft_s"),
        ({"ttft_s": 1e12}, "ttft_s"),
        ({"ttft_s": "nan"}, "ttft_s"),
        ({"ttft_s": "inf"}, "ttft_s"),
        ({"ttft_s": True}, "ttft_s"),
        ({"tpot_s": [1]}, "tpot_s"),
        ({"target": 1.5}, "target"),
        ({"target": 0}, "target"),
        ({"value": -1}, "value"),
        ({"deadline_s": 0.5}, "deadline_s"),
        ({"may_defer": "perhaps"}, "may_defer"),
        ({"name": "two words"}, "name"),
        ({"name": "a\x00b"}, "name"),
        ({"name": "x" * 65}, "name"),
        ({"tenant": "nobody"}, "tenant"),
        ({"ttft": 1}, "ttft"),
    ],
)
def test_what_is_wrong_is_named(operator, change, field):
    answer = operator.post("/slo-classes", {**NEW, **change})
    assert answer.status_code == 400, answer.data
    assert answer.data["error"]["code"] == "validation_failed"
    assert field in answer.data["error"]["fields"], answer.data
    assert not SLOClass.objects.exists()


def test_a_taken_name_is_a_conflict(operator):
    factories.slo_class(name="interactive")
    answer = operator.post("/slo-classes", NEW)
    assert answer.status_code == 409, answer.data
    said = "A class with this name already exists for all tenants."
    assert answer.data["error"] == {"code": "conflict", "message": f"name: {said}", "fields": {"name": [said]}}


def test_a_name_that_is_taken_in_the_same_moment_is_the_same_conflict(operator, tenant, monkeypatch):
    factories.rival_class(monkeypatch, name="interactive", tenant=tenant)
    answer = operator.post("/slo-classes", {**NEW, "tenant": tenant.name})
    assert answer.status_code == 409, answer.data
    said = f"A class with this name already exists for {tenant.name}."
    assert answer.data["error"] == {"code": "conflict", "message": f"name: {said}", "fields": {"name": [said]}}


def test_a_tenants_own_class_may_have_a_shared_name(operator, tenant):
    factories.slo_class(name="interactive")
    answer = operator.post("/slo-classes", {**NEW, "tenant": tenant.name})
    assert answer.status_code == 201, answer.data
    assert answer.data["tenant"] == tenant.name


def test_name_and_tenant_never_change(operator):
    row = factories.slo_class()
    answer = operator.patch(f"/slo-classes/{row.pk}", {"name": "other", "version": 1})
    assert answer.status_code == 400
    assert "name" in answer.data["error"]["fields"]


@pytest.mark.parametrize(
    "change",
    [{"name": "other"}, {"id": 99}, {"tenant": None}, {"created_at": "2026-01-01T00:00:00Z"}, {"updated_at": None}],
)
def test_what_is_shown_and_takes_no_value_is_not_called_unknown(operator, change):
    row = factories.slo_class()
    (field,) = change
    answer = operator.patch(f"/slo-classes/{row.pk}", {**change, "version": 1})
    assert answer.status_code == 400
    assert answer.data["error"]["fields"] == {field: ["This field cannot be changed."]}
    row.refresh_from_db()
    assert row.version == 1


def test_each_field_is_answered_for_itself(operator):
    row = factories.slo_class()
    answer = operator.patch(f"/slo-classes/{row.pk}", {"id": 9, "ttft": 1, "items": [], "version": 1})
    unknown = ["Unknown field."]
    assert answer.data["error"]["fields"] == {
        "id": ["This field cannot be changed."], "ttft": unknown, "items": unknown,
    }  # fmt: skip


def test_what_a_new_one_is_given_by_the_service_is_not_called_unknown_either(operator):
    answer = operator.post("/slo-classes", {**NEW, "id": 9, "version": 3, "ttft": 1})
    assert answer.data["error"]["fields"] == {
        "id": ["This field cannot be set."],
        "version": ["This field cannot be set."],
        "ttft": ["Unknown field."],
    }


def test_a_wrong_query_parameter_is_unknown_whatever_the_rows_show(viewer):
    answer = viewer.get("/slo-classes", ttft_s="1")
    assert answer.data["error"]["fields"] == {"ttft_s": ["Unknown field."]}


def test_the_label_of_a_priority_is_no_name_for_a_class(operator):
    answer = operator.post("/slo-classes", {**NEW, "name": "priority-1"})
    assert answer.status_code == 400
    assert answer.data["error"]["message"].startswith("name: ")
    assert list(answer.data["error"]["fields"]) == ["name"]


def test_a_removed_default_is_in_the_record_of_the_tenant(operator):
    row = factories.slo_class()
    tenant = factories.tenant(name="acme", default_class=row)
    assert operator.delete(f"/slo-classes/{row.pk}", If_Match='"1"').status_code == 204
    tenant.refresh_from_db()
    assert (tenant.default_class, tenant.version) == (None, 2)
    assert Decision.objects.get(kind="tenant_updated", subject="acme").actor == operator.user.username
    assert Decision.objects.get(kind="slo_class_removed").inputs["default_of"] == ["acme"]


def test_a_class_is_removed_with_a_record(operator):
    row = factories.slo_class()
    assert operator.delete(f"/slo-classes/{row.pk}", If_Match='"1"').status_code == 204
    assert not SLOClass.objects.filter(pk=row.pk).exists()
    assert Decision.objects.get(kind="slo_class_removed").inputs["before"]["name"] == row.name


def test_a_stale_removal_is_a_conflict(operator):
    row = factories.slo_class(version=3)
    assert operator.delete(f"/slo-classes/{row.pk}", If_Match='"2"').status_code == 412
    assert SLOClass.objects.filter(pk=row.pk).exists()


def test_a_key_sees_its_tenants_classes_and_the_shared_ones(tenant, tenant_key):
    shared, own = factories.slo_class(name="a-shared"), factories.slo_class(name="b-own", tenant=tenant)
    theirs = factories.slo_class(name="c-theirs", tenant=factories.tenant())
    assert [row["id"] for row in tenant_key.get("/slo-classes").data["items"]] == [shared.pk, own.pk]
    assert tenant_key.get(f"/slo-classes/{own.pk}").status_code == 200
    assert tenant_key.get(f"/slo-classes/{theirs.pk}").status_code == 404


def test_the_list_is_narrowed_by_tenant(viewer, tenant):
    shared, own = factories.slo_class(), factories.slo_class(tenant=tenant)
    assert [row["id"] for row in viewer.get("/slo-classes", tenant=tenant.name).data["items"]] == [own.pk]
    assert [row["id"] for row in viewer.get("/slo-classes", tenant="").data["items"]] == [shared.pk]


def test_gateways_are_told_of_a_change_and_of_nothing_else(operator, monkeypatch, django_capture_on_commit_callbacks):
    told = []
    monkeypatch.setattr(live, "notify_config", told.append)
    with django_capture_on_commit_callbacks(execute=True):
        operator.get("/slo-classes")
        assert operator.post("/slo-classes", {"name": "chat"}).status_code == 400
    assert told == []
    with django_capture_on_commit_callbacks(execute=True):
        assert operator.post("/slo-classes", {"name": "chat", "ttft_s": 1, "tpot_s": 0.1}).status_code == 201
    assert len(told) == 1
