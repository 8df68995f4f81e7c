"""Tenants: admins own them, a key sees its own and no other."""

import json
from dataclasses import asdict

import pytest

from controller.core.snapshot import snapshot_from_json
from controller.models import Decision, Tenant
from controller.selectors.snapshot import gateway_snapshot
from tests import factories

pytestmark = [pytest.mark.db, pytest.mark.usefixtures("db")]


def test_an_admin_creates_a_tenant_with_a_default_class(admin):
    shared = factories.slo_class()
    answer = admin.post("/tenants", {"name": "acme", "rpm": 600, "default_class": shared.name})
    assert answer.status_code == 201, answer.data
    assert (answer.data["rpm"], answer.data["default_class"], answer.data["state"]) == (600, shared.name, "active")
    assert Decision.objects.get(kind="tenant_created").actor == admin.user.username


def test_a_new_tenant_has_the_default_quotas_unless_somebody_chose_others(admin, settings):
    settings.NEW_TENANT_RPM, settings.NEW_TENANT_TPM, settings.NEW_TENANT_CONCURRENCY = 60, 5_000, 7
    posted = admin.post("/tenants", {"name": "posted", "tpm": None}).data
    assert (posted["rpm"], posted["tpm"], posted["max_concurrency"]) == (60, None, 7)
    put = admin.put("/tenants/by-name/put", {"rpm": None}).data
    assert (put["rpm"], put["tpm"], put["max_concurrency"]) == (None, 5_000, 7)
    again = admin.put("/tenants/by-name/put", {"rpm": None})
    assert (again.status_code, again.data["version"]) == (200, 1)


ENTITLED = {
    "allowed_classes": ["batch", "chat"],
    "allowed_models": ["demo"],
    "highest_priority": 2,
    "tightest_ttft_s": 0.3,
    "tightest_tpot_s": 0.02,
    "tightest_deadline_s": 10.0,
    "queue_share": 0.1,
}


def test_entitlements_are_stored_audited_and_reach_gateways(admin, tenant):
    answer = admin.patch(f"/tenants/{tenant.pk}", {**ENTITLED, "version": 1})
    assert {name: answer.data[name] for name in ENTITLED} == ENTITLED
    decision = Decision.objects.get(kind="tenant_updated")
    assert decision.inputs["after"]["allowed_classes"] == ["batch", "chat"]
    (config,) = (each for each in gateway_snapshot().tenants if each.name == tenant.name)
    assert {**asdict(config.entitled), "allowed_classes": ["batch", "chat"], "allowed_models": ["demo"]} == ENTITLED
    assert snapshot_from_json(json.loads(json.dumps(asdict(gateway_snapshot())))).tenants == gateway_snapshot().tenants


def test_the_retention_of_answers_is_none_unless_somebody_chose_one_and_reaches_gateways(admin, tenant):
    assert admin.get(f"/tenants/{tenant.pk}").data["retention_s"] == 0
    answer = admin.patch(f"/tenants/{tenant.pk}", {"retention_s": 3600, "version": 1})
    assert answer.data["retention_s"] == 3600
    assert Decision.objects.get(kind="tenant_updated").inputs["after"]["retention_s"] == 3600
    (config,) = (each for each in gateway_snapshot().tenants if each.name == tenant.name)
    assert config.retention_s == 3600


def test_the_division_of_deadlines_is_that_of_the_time_left_unless_somebody_chose_another(admin, tenant):
    assert admin.get(f"/tenants/{tenant.pk}").data["stage_deadlines"] == "share_of_rest"
    answer = admin.patch(f"/tenants/{tenant.pk}", {"stage_deadlines": "accumulated", "version": 1})
    assert answer.data["stage_deadlines"] == "accumulated"
    assert Decision.objects.get(kind="tenant_updated").inputs["after"]["stage_deadlines"] == "accumulated"
    (config,) = (each for each in gateway_snapshot().tenants if each.name == tenant.name)
    assert config.stage_deadlines == "accumulated"


def test_the_default_class_is_among_the_allowed(admin, tenant):
    factories.slo_class(name="chat")
    answer = admin.patch(f"/tenants/{tenant.pk}", {"default_class": "chat", "allowed_classes": ["batch"], "version": 1})
    assert answer.status_code == 400
    assert answer.data["error"]["fields"] == {"default_class": ["This class is not among the allowed classes."]}


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"allowed_classes": "chat"}, "allowed_classes"),
        ({"allowed_classes": ["<b>"]}, "allowed_classes"),
        ({"allowed_models": [{"name": "m"}]}, "allowed_models.0"),
        ({"allowed_models": ["m"] * 101}, "allowed_models"),
        ({"highest_priority": -1}, "highest_priority"),
        ({"highest_priority": 1001}, "highest_priority"),
        ({"tightest_ttft_s": 0}, "tightest_ttft_s"),
        ({"tightest_tpot_s": -1}, "tightest_tpot_s"),
        ({"tightest_deadline_s": 90_000}, "tightest_deadline_s"),
        ({"queue_share": 0}, "queue_share"),
        ({"queue_share": 1.1}, "queue_share"),
        ({"retention_s": -1}, "retention_s"),
        ({"retention_s": 604_801}, "retention_s"),
        ({"retention_s": None}, "retention_s"),
        ({"stage_deadlines": "even"}, "stage_deadlines"),
        ({"stage_deadlines": None}, "stage_deadlines"),
    ],
)
def test_wrong_entitlements_name_their_field(admin, tenant, change, field):
    answer = admin.patch(f"/tenants/{tenant.pk}", {**change, "version": 1})
    assert answer.status_code == 400
    assert list(answer.data["error"]["fields"]) == [field]


def test_a_quota_is_changed_and_lifted(admin, tenant):
    answer = admin.patch(f"/tenants/{tenant.pk}", {"tpm": 1000, "version": 1})
    assert answer.data["tpm"] == 1000
    answer = admin.patch(f"/tenants/{tenant.pk}", {"tpm": None}, If_Match=answer["ETag"])
    assert (answer.data["tpm"], answer.data["version"]) == (None, 3)
    assert Decision.objects.filter(kind="tenant_updated").count() == 2


def test_a_change_that_changes_nothing_leaves_no_record(admin, tenant):
    answer = admin.patch(f"/tenants/{tenant.pk}", {"title": tenant.title, "version": 1})
    assert answer.data["version"] == 1
    assert not Decision.objects.exists()


def test_a_tenants_own_class_wins_over_a_shared_one_of_its_name(admin, tenant):
    factories.slo_class(name="chat")
    own = factories.slo_class(name="chat", tenant=tenant)
    admin.patch(f"/tenants/{tenant.pk}", {"default_class": "chat", "version": 1})
    tenant.refresh_from_db()
    assert tenant.default_class == own


def test_another_tenants_class_cannot_be_the_default(admin, tenant):
    theirs = factories.slo_class(tenant=factories.tenant())
    answer = admin.patch(f"/tenants/{tenant.pk}", {"default_class": theirs.name, "version": 1})
    assert answer.status_code == 400
    assert "default_class" in answer.data["error"]["fields"]


def test_a_default_class_is_taken_away(admin):
    tenant = factories.tenant(default_class=factories.slo_class())
    assert admin.patch(f"/tenants/{tenant.pk}", {"default_class": None, "version": 1}).data["default_class"] is None


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"rpm": 0}, "rpm"),
        ({"rpm": 2**40}, "rpm"),
        ({"tpm": "many"}, "tpm"),
        ({"weight": 2}, "weight"),  # no such field: nothing would act on it
        ({"max_concurrency": 1.5}, "max_concurrency"),
        ({"name": ""}, "name"),
        ({"default_class": "none"}, "default_class"),
        ({"title": "x" * 121}, "title"),
    ],
)
def test_what_is_wrong_is_named(admin, change, field):
    answer = admin.post("/tenants", {"name": "acme", **change})
    assert answer.status_code == 400, answer.data
    assert field in answer.data["error"]["fields"]


def test_a_taken_name_is_a_conflict(admin, tenant):
    answer = admin.post("/tenants", {"name": tenant.name})
    assert (answer.status_code, answer.data["error"]["code"]) == (409, "conflict")


def test_a_key_sees_its_own_tenant_alone(tenant, tenant_key, other_key):
    assert [row["name"] for row in tenant_key.get("/tenants").data["items"]] == [tenant.name]
    assert tenant_key.get(f"/tenants/{tenant.pk}").status_code == 200
    assert other_key.get(f"/tenants/{tenant.pk}").status_code == 404


def test_a_tenant_is_removed_with_a_record(admin, tenant):
    assert admin.delete(f"/tenants/{tenant.pk}").status_code == 204
    assert not Tenant.objects.filter(pk=tenant.pk).exists()
    assert Decision.objects.get(kind="tenant_removed").inputs["before"]["name"] == tenant.name


def test_a_key_reads_no_path_of_the_gateways_machines(tenant_key, viewer):
    path = "/models/demo/tokenizer.json"
    row = factories.served_model(tokenizer=path)
    for caller, shown in ((viewer, path), (tenant_key, "")):
        assert caller.get(f"/models/{row.pk}").data["tokenizer"] == shown
        assert caller.get("/models").data["items"][0]["tokenizer"] == shown


def test_a_key_learns_whether_all_is_well_and_not_what_there_is(tenant_key, viewer):
    told = tenant_key.get("/health").data
    assert told["status"] in ("ok", "degraded")
    assert told["components"] == []
    assert viewer.get("/health").data["components"]
