"""API keys: the secret is seen once, a revoked key stays on record."""

import datetime as dt

import pytest
from django.utils import timezone

from controller.models import ApiKey, Decision
from controller.models.tenants import secret_digest
from tests import factories
from tests.api.control.conftest import Caller

pytestmark = [pytest.mark.db, pytest.mark.usefixtures("db")]


def test_the_secret_is_shown_once_and_works(admin, tenant):
    answer = admin.post("/api-keys", {"tenant": tenant.name, "name": "laptop"})
    assert answer.status_code == 201, answer.data
    secret = answer.data["secret"]
    assert secret.startswith("sk-")
    assert answer["Cache-Control"] == "no-store"
    assert Caller(secret=secret).get("/tenants").status_code == 200
    read = admin.get(f"/api-keys/{answer.data['id']}").data
    assert "secret" not in read
    assert secret not in str(read) + str(admin.get("/api-keys").data)


def test_neither_secret_nor_digest_is_in_the_audit(admin, tenant):
    secret = admin.post("/api-keys", {"tenant": tenant.name, "name": "laptop"}).data["secret"]
    decision = Decision.objects.get(kind="api_key_created")
    assert decision.actor == admin.user.username
    shown = str(decision.inputs) + str(decision.outcome) + str(admin.get("/decisions").data)
    assert secret not in shown
    assert secret_digest(secret) not in shown


def test_revoking_twice_is_one_record(admin, tenant):
    made = factories.api_key(tenant)
    first = admin.post(f"/api-keys/{made.key.pk}/revoke")
    assert first.status_code == 200
    assert first.data["revoked_at"] is not None
    assert admin.post(f"/api-keys/{made.key.pk}/revoke").data["revoked_at"] == first.data["revoked_at"]
    assert Decision.objects.filter(kind="api_key_revoked", actor=admin.user.username).count() == 1


def test_a_key_that_is_not_there_cannot_be_revoked(admin):
    assert admin.post("/api-keys/12345/revoke").status_code == 404


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"tenant": "nobody"}, "tenant"),
        ({"name": ""}, "name"),
        ({"scopes": []}, "scopes"),
        ({"scopes": ["root"]}, "scopes.0"),
        ({"expires_at": "2020-01-01T00:00:00Z"}, "expires_at"),
        ({"expires_at": "tomorrow"}, "expires_at"),
        ({"secret": "sk-mine"}, "secret"),
    ],
)
def test_what_is_wrong_is_named(admin, tenant, change, field):
    answer = admin.post("/api-keys", {"tenant": tenant.name, "name": "laptop", **change})
    assert answer.status_code == 400, answer.data
    assert field in answer.data["error"]["fields"], answer.data
    assert not ApiKey.objects.exists()


def test_a_key_sees_its_tenants_keys_alone(tenant, tenant_key, other_key):
    own = ApiKey.objects.get(tenant=tenant)
    assert [row["id"] for row in tenant_key.get("/api-keys").data["items"]] == [own.pk]
    assert other_key.get(f"/api-keys/{own.pk}").status_code == 404
    theirs = other_key.get("/api-keys", tenant=tenant.name).data["items"]
    assert theirs == []


def test_the_list_is_narrowed_to_usable_keys(viewer, tenant):
    good, revoked, expired = (factories.api_key(tenant).key for _ in range(3))
    ApiKey.objects.filter(pk=revoked.pk).update(revoked_at=timezone.now())
    ApiKey.objects.filter(pk=expired.pk).update(expires_at=timezone.now() - dt.timedelta(hours=1))
    assert [row["id"] for row in viewer.get("/api-keys", active="true").data["items"]] == [good.pk]
    rest = [row["id"] for row in viewer.get("/api-keys", active="false").data["items"]]
    assert rest == [revoked.pk, expired.pk]
    assert len(viewer.get("/api-keys").data["items"]) == 3
