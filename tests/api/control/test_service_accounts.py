"""Service accounts in the control API: role, scopes, expiry, rotation, revocation, and who the audit says it was."""

from __future__ import annotations

from datetime import timedelta

import pytest
from django.core.exceptions import ValidationError
from django.utils import timezone

from api.control.access.scopes import OF_RESOURCE, scope_missing
from api.control.urls import urlpatterns
from controller.models import Decision, ServiceAccount, ServiceToken, SLOClass
from controller.services.access.service_accounts import (
    service_account_create,
    service_account_update,
    service_token_create,
    service_token_revoke,
    service_token_rotate,
)
from controller.services.records import refusals
from tests import factories
from tests.api.control.conftest import Caller
from tests.api.control.test_access import RULES

pytestmark = [pytest.mark.db, pytest.mark.usefixtures("db")]
ALL = list(ServiceAccount.Scope.values)
CLASS = {"name": "made-by-a-program", "ttft_s": 1.0, "tpot_s": 0.1}


def account(role="operator", scopes=ALL, name="deployer"):
    return service_account_create(actor=factories.ACTOR, name=name, role=role, scopes=scopes)


def token(row=None, days=30, **fields):
    expires_at = timezone.now() + timedelta(days=days)
    return service_token_create(actor=factories.ACTOR, account=row or account(**fields), expires_at=expires_at)


def caller(**fields):
    return Caller(secret=token(**fields).secret)


def test_a_program_changes_something_and_the_audit_names_it():
    answer = caller().post("/slo-classes", CLASS)
    assert answer.status_code == 201, answer.data
    decision = Decision.objects.get(kind="slo_class_created")
    assert (decision.actor_type, decision.actor, decision.reason) == ("service", "deployer", "service_created")


@pytest.mark.sampled(40)
@pytest.mark.parametrize(("method", "path"), RULES, ids=[f"{method} {path}" for method, path in RULES])
def test_a_role_opens_what_it_opens_for_a_person(method, path):
    for role in ("viewer", "operator", "admin"):
        answer = getattr(caller(role=role, name=f"with-{role}"), method)(path)
        allowed = role in RULES[method, path]
        assert (answer.status_code != 403) is allowed, (role, answer.data)
        assert answer.status_code in (200, 201, 400, 403, 404, 428, 503), (role, answer.data)


def test_a_scope_opens_its_resources_alone(monkeypatch):
    monkeypatch.setattr(refusals, "LOG", refusals.Bounded())
    program = caller(role="admin", scopes=["configuration"])
    assert program.post("/slo-classes", CLASS).status_code == 201
    assert program.get("/slo-classes").status_code == 200
    for method, path in (("post", "/tenants"), ("get", "/tenants"), ("post", "/queue/cancel"), ("get", "/decisions")):
        answer = getattr(program, method)(path)
        assert (answer.status_code, answer.data["error"]["code"]) == (403, "permission_denied"), path
    assert "lacks the scope 'tenants'" in program.post("/tenants").data["error"]["message"]
    refused = Decision.objects.filter(kind="access_refused").first()
    assert (refused.actor_type, refused.actor, refused.reason) == ("service", "deployer", "scope_missing")


def test_to_read_is_not_to_change():
    program = caller(role="admin", scopes=["read"])
    assert program.get("/tenants").status_code == 200
    assert program.post("/slo-classes", CLASS).status_code == 403
    assert not SLOClass.objects.exists()


def test_every_resource_that_can_be_changed_has_a_scope():
    """A resource added without an entry could be changed by nobody, and says so here."""
    for pattern in urlpatterns[:-1]:
        resource = str(pattern.pattern).split("/", 1)[0]
        if set(pattern.callback.view_class.access) - {"GET"}:
            assert resource in OF_RESOURCE, resource
    assert scope_missing(ALL, "POST", "/api/v1/something-new") == "read"


def test_a_token_is_shown_once_and_stored_as_a_digest():
    made = token()
    assert made.secret.startswith("slk-")
    stored = ServiceToken.objects.get()
    assert made.secret not in str(vars(stored))
    assert made.secret not in str(list(Decision.objects.values_list("inputs", "outcome")))


@pytest.mark.parametrize("days", [0, -1, 400])
def test_a_token_expires_within_a_year(days):
    with pytest.raises(ValidationError):
        token(days=days)


def refused(program):
    answer = program.get("/slo-classes")
    return (answer.status_code, answer.data.get("error", {}).get("code")) == (401, "invalid_api_key")


def test_a_token_ends_by_expiry_revocation_and_suspension():
    row = account()
    expiring, revoked, other = (token(row) for _ in range(3))
    ServiceToken.objects.filter(pk=expiring.token.pk).update(expires_at=timezone.now())
    service_token_revoke(actor=factories.ACTOR, token_id=revoked.token.pk)
    assert refused(Caller(secret=expiring.secret))
    assert refused(Caller(secret=revoked.secret))
    assert not refused(Caller(secret=other.secret))
    service_account_update(
        actor=factories.ACTOR, account_id=row.pk, version=row.version, changes={"state": "suspended"}
    )
    assert refused(Caller(secret=other.secret))
    assert refused(Caller(secret="slk-" + 43 * "x"))


def test_a_clock_that_steps_back_revives_no_token(monkeypatch):
    made = token()
    ServiceToken.objects.update(expires_at=timezone.now() - timedelta(hours=1))
    monkeypatch.setattr(timezone, "now", lambda: made.token.created_at - timedelta(days=1))
    assert refused(Caller(secret=made.secret))


def test_a_rotated_token_works_until_its_grace_ends():
    old = token()
    expires_at, grace = timezone.now() + timedelta(days=30), timedelta(hours=1)
    new = service_token_rotate(actor=factories.ACTOR, token_id=old.token.pk, expires_at=expires_at, grace=grace)
    assert not refused(Caller(secret=old.secret))
    assert not refused(Caller(secret=new.secret))
    now = service_token_rotate(actor=factories.ACTOR, token_id=new.token.pk, expires_at=expires_at, grace=timedelta(0))
    assert refused(Caller(secret=new.secret))
    assert not refused(Caller(secret=now.secret))
    kinds = ("service_token_created", "service_token_rotated", "service_token_revoked")
    assert [Decision.objects.filter(kind=kind).count() for kind in kinds] == [3, 1, 1]
    with pytest.raises(ValidationError, match="cannot be rotated"):
        service_token_rotate(actor=factories.ACTOR, token_id=new.token.pk, expires_at=expires_at, grace=grace)


def test_a_program_has_its_role_as_of_now():
    row = account(role="operator")
    program = Caller(secret=token(row).secret)
    assert program.post("/slo-classes", CLASS).status_code == 201
    service_account_update(actor=factories.ACTOR, account_id=row.pk, version=1, changes={"role": "viewer"})
    assert program.post("/slo-classes", {**CLASS, "name": "another"}).status_code == 403


def test_when_a_token_was_used_is_stored():
    made = token()
    Caller(secret=made.secret).get("/slo-classes")
    assert ServiceToken.objects.get().last_used_at is not None


def test_a_token_opens_no_page_and_no_data_path_key_is_a_token(client, tenant_key):
    secret = token(role="admin").secret
    answer = client.get("/tenants/", headers={"authorization": f"Bearer {secret}"})
    assert (answer.status_code, answer["location"]) == (302, "/login/?next=/tenants/")
    assert tenant_key.post("/slo-classes", CLASS).status_code == 403
