"""Who may call what: every address and method, for anonymous, viewer, operator, admin and a tenant's key."""

import datetime as dt
import re

import pytest
from django.urls import get_resolver
from django.utils import timezone
from rest_framework.response import Response
from rest_framework.test import APIRequestFactory, force_authenticate

from api.control.framework.base import ControlView
from api.control.urls import urlpatterns
from controller.models import ApiKey, SLOClass, Tenant
from tests import factories
from tests.api.control.conftest import ROOT, Caller

pytestmark = [pytest.mark.db, pytest.mark.usefixtures("db")]

EVERYBODY = {"viewer", "operator", "admin", "tenant_key"}
PEOPLE = {"viewer", "operator", "admin"}
OPERATORS = {"operator", "admin"}
ADMINS = {"admin"}
NO_SUCH = "/999999"  # permissions come before the object: 404 means "you would have been allowed"

BY_NAME = {
    "/tenants/by-name": ADMINS,
    "/slo-classes/by-name": OPERATORS,
    "/priority-mappings/by-tenant": OPERATORS,
}  # who may change; everybody may read

# (method, address): who gets past the permission check.
RULES = {
    ("get", "/tenants"): EVERYBODY,
    ("post", "/tenants"): ADMINS,
    ("get", "/tenants" + NO_SUCH): EVERYBODY,
    ("patch", "/tenants" + NO_SUCH): ADMINS,
    ("delete", "/tenants" + NO_SUCH): ADMINS,
    ("get", "/api-keys"): EVERYBODY,
    ("post", "/api-keys"): ADMINS,
    ("get", "/api-keys" + NO_SUCH): EVERYBODY,
    ("post", "/api-keys" + NO_SUCH + "/revoke"): ADMINS,
    ("get", "/slo-classes"): EVERYBODY,
    ("post", "/slo-classes"): OPERATORS,
    ("get", "/slo-classes" + NO_SUCH): EVERYBODY,
    ("patch", "/slo-classes" + NO_SUCH): OPERATORS,
    ("delete", "/slo-classes" + NO_SUCH): OPERATORS,
    ("get", "/priority-mappings"): EVERYBODY,
    ("post", "/priority-mappings"): OPERATORS,
    ("get", "/priority-mappings" + NO_SUCH): EVERYBODY,
    ("patch", "/priority-mappings" + NO_SUCH): OPERATORS,
    ("delete", "/priority-mappings" + NO_SUCH): OPERATORS,
    ("get", "/models"): EVERYBODY,
    ("post", "/models"): ADMINS,
    ("get", "/models" + NO_SUCH): EVERYBODY,
    ("patch", "/models" + NO_SUCH): ADMINS,
    ("delete", "/models" + NO_SUCH): ADMINS,
    ("get", "/launch-templates"): PEOPLE,
    ("post", "/launch-templates"): ADMINS,
    ("get", "/launch-templates" + NO_SUCH): PEOPLE,
    ("patch", "/launch-templates" + NO_SUCH): ADMINS,
    ("delete", "/launch-templates" + NO_SUCH): ADMINS,
    ("post", "/launch-templates" + NO_SUCH + "/resume"): OPERATORS,
    ("get", "/launch-templates/by-name" + NO_SUCH): PEOPLE,
    ("put", "/launch-templates/by-name" + NO_SUCH): ADMINS,
    ("delete", "/launch-templates/by-name" + NO_SUCH): ADMINS,
    ("get", "/hosts"): PEOPLE,
    ("post", "/hosts"): ADMINS,
    ("get", "/hosts" + NO_SUCH): PEOPLE,
    ("patch", "/hosts" + NO_SUCH): ADMINS,
    ("delete", "/hosts" + NO_SUCH): ADMINS,
    ("get", "/devices"): PEOPLE,
    ("post", "/devices"): ADMINS,
    ("get", "/devices" + NO_SUCH): PEOPLE,
    ("patch", "/devices" + NO_SUCH): ADMINS,
    ("delete", "/devices" + NO_SUCH): ADMINS,
    ("get", "/links"): PEOPLE,
    ("post", "/links"): ADMINS,
    ("get", "/links" + NO_SUCH): PEOPLE,
    ("patch", "/links" + NO_SUCH): ADMINS,
    ("delete", "/links" + NO_SUCH): ADMINS,
    ("get", "/instances"): PEOPLE,
    ("post", "/instances"): OPERATORS,
    ("get", "/instances" + NO_SUCH): PEOPLE,
    ("patch", "/instances" + NO_SUCH): OPERATORS,
    ("delete", "/instances" + NO_SUCH): OPERATORS,
    ("get", "/instances" + NO_SUCH + "/log"): OPERATORS,
    ("post", "/instances" + NO_SUCH + "/drain"): OPERATORS,
    ("post", "/instances" + NO_SUCH + "/stop"): OPERATORS,
    ("post", "/instances" + NO_SUCH + "/desired-state"): OPERATORS,
    ("post", "/instances" + NO_SUCH + "/set-role"): OPERATORS,
    ("post", "/instances" + NO_SUCH + "/sleep"): OPERATORS,
    ("post", "/instances" + NO_SUCH + "/wake"): OPERATORS,
    ("post", "/instances" + NO_SUCH + "/load"): OPERATORS,
    ("get", "/starts"): PEOPLE,
    ("get", "/actions"): PEOPLE,
    ("get", "/actions" + NO_SUCH): PEOPLE,
    ("get", "/scaling-policies"): PEOPLE,
    ("post", "/scaling-policies"): OPERATORS,
    ("get", "/scaling-policies" + NO_SUCH): PEOPLE,
    ("patch", "/scaling-policies" + NO_SUCH): OPERATORS,
    ("delete", "/scaling-policies" + NO_SUCH): OPERATORS,
    ("post", "/scaling-policies" + NO_SUCH + "/hold"): OPERATORS,
    ("delete", "/scaling-policies" + NO_SUCH + "/hold"): OPERATORS,
    ("get", "/decisions"): PEOPLE,
    ("get", "/decisions" + NO_SUCH): PEOPLE,
    ("get", "/requests"): EVERYBODY,
    ("get", "/requests" + NO_SUCH): EVERYBODY,
    ("get", "/attainment"): EVERYBODY,
    ("get", "/goodput"): EVERYBODY,
    ("get", "/goodput/stages"): EVERYBODY,
    ("get", "/graph-versions"): PEOPLE,
    ("get", "/graph-versions/graphs"): PEOPLE,
    ("get", "/learned-takeovers"): PEOPLE,
    ("get", "/length-versions"): PEOPLE,
    ("get", "/queue"): EVERYBODY,
    ("post", "/queue/cancel"): OPERATORS,
    ("post", "/queue/reprioritise"): OPERATORS,
    ("post", "/queue/pause"): OPERATORS,
    ("post", "/queue/resume"): OPERATORS,
    ("get", "/workflow-results"): EVERYBODY,
    ("get", "/workflows"): EVERYBODY,
    ("get", "/workflows/by-id"): EVERYBODY,
    ("post", "/workflows/cancel"): OPERATORS,
    ("get", "/simulations"): PEOPLE,
    ("post", "/simulations"): OPERATORS,
    ("get", "/simulations" + NO_SUCH): PEOPLE,
    ("patch", "/simulations" + NO_SUCH): OPERATORS,
    ("delete", "/simulations" + NO_SUCH): OPERATORS,
    ("post", "/simulations" + NO_SUCH + "/cancel"): OPERATORS,
    ("get", "/simulations" + NO_SUCH + "/result"): PEOPLE,
    ("get", "/simulations" + NO_SUCH + "/result.csv"): PEOPLE,
    ("get", "/traces"): PEOPLE,
    ("post", "/traces"): OPERATORS,
    ("get", "/traces" + NO_SUCH): PEOPLE,
    ("delete", "/traces" + NO_SUCH): OPERATORS,
    ("get", "/instance-links"): PEOPLE,
    ("get", "/instance-links" + NO_SUCH): PEOPLE,
    ("get", "/kv-transfers"): PEOPLE,
    ("get", "/kv-transfers" + NO_SUCH): PEOPLE,
    ("get", "/transfers"): PEOPLE,
    ("get", "/transfers" + NO_SUCH): PEOPLE,
    ("get", "/health"): EVERYBODY,
    **{("get", path + NO_SUCH): EVERYBODY for path in BY_NAME},
    **{(method, path + NO_SUCH): who for path, who in BY_NAME.items() for method in ("put", "delete")},
    ("get", "/priority-mappings/shared"): EVERYBODY,
    ("put", "/priority-mappings/shared"): OPERATORS,
    ("delete", "/priority-mappings/shared"): OPERATORS,
    ("get", "/flow-settings"): PEOPLE,
    ("put", "/flow-settings"): OPERATORS,
    ("get", "/scaling-policies/by-model" + NO_SUCH): PEOPLE,
    ("put", "/scaling-policies/by-model" + NO_SUCH): OPERATORS,
    ("delete", "/scaling-policies/by-model" + NO_SUCH): OPERATORS,
    ("put", "/instances" + NO_SUCH): OPERATORS,
}


def call(caller: Caller, method: str, path: str):
    return getattr(caller, method)(path)


def test_every_address_has_a_rule():
    """A resource added without an entry here fails this test."""
    for pattern in urlpatterns[:-1]:
        path = "/" + re.sub(r"<\w+:\w+>", "999999", str(pattern.pattern))
        methods = {method.lower() for method in pattern.callback.view_class.access}
        assert methods == {method for method, address in RULES if address == path}, path


@pytest.mark.parametrize(("method", "path"), RULES, ids=[f"{method} {path}" for method, path in RULES])
def test_the_rule_of(method, path, request):
    for name in ("viewer", "operator", "admin", "tenant_key"):
        answer = call(request.getfixturevalue(name), method, path)
        if name in RULES[method, path]:
            assert answer.status_code in (200, 201, 400, 404, 428, 503), (name, answer.data)
        else:
            assert answer.status_code == 403, (name, answer.data)
            assert answer.data["error"]["code"] == "permission_denied"
    answer = call(request.getfixturevalue("anonymous"), method, path)
    assert answer.status_code == 401, answer.data
    assert answer.data["error"]["code"] == "not_authenticated"
    assert answer["WWW-Authenticate"].startswith("Bearer")


def test_no_one_without_a_role_gets_in():
    assert Caller(factories.user()).get("/tenants").status_code == 403


def test_a_superuser_is_an_admin():
    root = Caller(factories.user(is_superuser=True))
    assert root.post("/tenants", {"name": "acme"}).status_code == 201


def test_other_methods_are_not_allowed(admin):
    assert admin.delete("/tenants").status_code == 405
    assert admin.patch("/decisions/1").data["error"]["code"] == "method_not_allowed"


def bearer(secret: str):
    return Caller(secret=secret).get("/tenants")


def test_an_unknown_key_is_refused():
    answer = bearer("sk-nobody")
    assert answer.status_code == 401
    assert answer.data["error"]["code"] == "invalid_api_key"


def test_a_revoked_key_is_refused_at_once(admin):
    made = factories.api_key()
    assert bearer(made.secret).status_code == 200
    admin.post(f"/api-keys/{made.key.pk}/revoke")
    assert bearer(made.secret).status_code == 401


def test_an_expired_key_is_refused():
    made = factories.api_key()
    ApiKey.objects.filter(pk=made.key.pk).update(expires_at=timezone.now() - dt.timedelta(seconds=1))
    assert bearer(made.secret).status_code == 401


def test_a_console_whose_clock_is_set_back_revives_no_key(monkeypatch):
    made, now = factories.api_key(), timezone.now()
    ApiKey.objects.filter(pk=made.key.pk).update(expires_at=now - dt.timedelta(hours=1))
    monkeypatch.setattr(timezone, "now", lambda: now - dt.timedelta(days=1))
    assert bearer(made.secret).status_code == 401


def test_a_suspended_tenants_key_is_refused():
    made = factories.api_key()
    Tenant.objects.update(state=Tenant.State.SUSPENDED)
    assert bearer(made.secret).status_code == 401


def test_a_key_for_inference_alone_may_not_read():
    answer = bearer(factories.api_key(scopes=["inference"]).secret)
    assert answer.status_code == 403
    assert "read" in answer.data["error"]["message"]


@pytest.mark.parametrize("header", ["Bearer", "Bearer ", "Bearer \xff\xfe", "Bearer " + "x" * 10_000])
def test_a_malformed_key_is_refused(anonymous, header):
    answer = anonymous.client.get(f"{ROOT}/tenants", headers={"Authorization": header})
    assert answer.status_code == 401


def test_the_use_of_a_key_is_noted():
    made = factories.api_key()
    bearer(made.secret)
    made.key.refresh_from_db()
    assert timezone.now() - made.key.last_used_at < dt.timedelta(minutes=1)


def test_a_browser_needs_the_csrf_token_to_write(operator):
    operator.client.handler.enforce_csrf_checks = True
    answer = operator.post("/slo-classes", {"name": "a", "ttft_s": 1, "tpot_s": 0.1})
    assert answer.status_code == 403
    assert not SLOClass.objects.filter(name="a").exists()


def test_a_key_needs_no_csrf_token_and_writes_nothing(tenant_key):
    tenant_key.client.handler.enforce_csrf_checks = True
    assert tenant_key.post("/slo-classes", {"name": "a", "ttft_s": 1, "tpot_s": 0.1}).status_code == 403
    assert tenant_key.get("/slo-classes").status_code == 200


def test_the_api_is_mounted():
    assert get_resolver().resolve("/api/v1/tenants").func.view_class.__name__ == "TenantList"


@pytest.mark.parametrize(("role", "status"), [("viewer", 403), ("operator", 403), ("admin", 200)])
def test_a_method_without_a_rule_is_for_admins(role, status):
    class Forgotten(ControlView):
        def get(self, request):
            return Response({})

    request = APIRequestFactory().get("/")
    force_authenticate(request, factories.user(role))
    assert Forgotten.as_view()(request).status_code == status


def test_a_head_is_allowed_to_whom_a_get_is(viewer):
    assert viewer.client.head(ROOT + "/hosts").status_code == 200
