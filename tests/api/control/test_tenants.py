"""Tenants: admins own them, a key sees its own and no other."""

import pytest

from controller.models import Decision, Tenant
from tests import factories

pytestmark = [pytest.mark.db, pytest.mark.usefixtures("db")]


def test_an_admin_creates_a_tenant_with_a_default_class(admin):
    shared = factories.slo_class()
    answer = admin.post("/tenants", {"name": "acme", "rpm": 600, "default_class": shared.name})
    assert answer.status_code == 201, answer.data
    assert (answer.data["rpm"], answer.data["default_class"], answer.data["state"]) == (600, shared.name, "active")
    assert Decision.objects.get(kind="tenant_created").actor == admin.user.username


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
