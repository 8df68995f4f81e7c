"""Schemathesis over every operation of the control API as each role. Each case is rolled back."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import pytest
import schemathesis
from django.conf import settings
from django.core.signals import request_finished, request_started
from django.core.wsgi import get_wsgi_application
from django.db import close_old_connections, transaction
from django.test import Client
from django.utils import timezone
from hypothesis import HealthCheck, Phase, given
from hypothesis import settings as examples
from schemathesis import Case
from schemathesis.core.failures import FailureGroup
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from api.control.access import throttle
from controller.models import ServiceAccount
from controller.services.access.service_accounts import service_account_create, service_token_create
from tests import factories
from tests.fuzz import tally

pytestmark = [pytest.mark.fuzz, pytest.mark.db, pytest.mark.usefixtures("db")]

PEOPLE = ("admin", "operator", "viewer")
PROGRAMS = ("operator_token", "viewer_token")  # of service accounts
ROLES = (*PEOPLE, *PROGRAMS, "tenant_key", "nobody")
EACH = 2 * tally.SCALE  # cases of an operation and role
CSRF = "a" * 32
ANSWERS: Counter[tuple[str, int]] = Counter()


def cookies(role: str) -> dict[str, str]:
    """Of a browser in which a person of this role is signed in."""
    client = Client()
    client.force_login(factories.user(role))
    return {name: morsel.value for name, morsel in client.cookies.items()} | {settings.CSRF_COOKIE_NAME: CSRF}


@pytest.fixture
def callers(db: Any) -> dict[str, dict[str, str]]:
    """The headers that each role sends."""
    for make in (factories.slo_class, factories.priority_mapping, factories.instance, factories.scaling_policy):
        make()
    headers = {"tenant_key": {"Authorization": f"Bearer {factories.api_key().secret}"}, "nobody": {}}
    for role in PEOPLE:
        headers[role] = {"X-CSRFToken": CSRF}
    for role in PROGRAMS:
        headers[role] = {"Authorization": f"Bearer {service_token(role)}"}
    return headers


def service_token(role: str) -> str:
    fields = {"name": role.replace("_", "-"), "role": role.removesuffix("_token")}
    account = service_account_create(actor=factories.ACTOR, scopes=list(ServiceAccount.Scope.values), **fields)
    expires_at = timezone.now() + timedelta(days=1)
    return service_token_create(actor=factories.ACTOR, account=account, expires_at=expires_at).secret


@pytest.fixture(autouse=True)
def kept_connection() -> Iterator[None]:
    """Each request would close the database connection at its end, and so the transaction that a case is undone in."""
    signals = (request_started, request_finished)
    for signal in signals:
        signal.disconnect(close_old_connections)
    yield
    for signal in signals:
        signal.connect(close_old_connections)


@pytest.fixture(scope="session")
def schema() -> Any:
    loaded = schemathesis.openapi.from_path("docs/openapi.yaml")
    loaded.app = get_wsgi_application()
    return loaded


def operations(schema: Any) -> Iterator[Any]:
    for result in schema.get_all_operations():
        operation = result.ok()
        if operation.path.startswith("/api/v1/"):
            yield operation


def judge(case: Case, response: Any, role: str) -> None:
    what = f"{role}: {case.method} {response.request.url if response.request else case.path} {case.body!r}"
    if response.status_code >= 500 and response.status_code != 503:
        tally.fault("server_errors", f"{response.status_code} {what}: {response.content[:200]!r}")
        return
    checks: list[Any] = [status_code_conformance, content_type_conformance, response_schema_conformance]
    try:
        case.validate_response(response, checks=checks)
    except FailureGroup as group:
        said = "; ".join(f"{each.title}: {each.message[:200]}" for each in group.exceptions)
        tally.fault("undocumented", f"{response.status_code} {what}: {said}")


@pytest.mark.parametrize("role", ROLES)
def test_every_operation_answers_as_it_is_documented(role: str, schema: Any, callers: dict[str, dict[str, str]]):
    signed_in = cookies(role) if role in PEOPLE else {}
    before = {kind: len(each) for kind, each in tally.FAULTS.items()}
    for operation in operations(schema):
        _try(operation, lambda case: _call(case, role, callers[role], signed_in))
    if role not in ("nobody", "tenant_key"):
        assert ANSWERS[role, 200], "nothing was reached behind the sign-in"
    assert {kind: tally.faults_of(kind, since) for kind, since in before.items()} == {kind: [] for kind in before}


def _try(operation: Any, call: Callable[[Case], None]) -> None:
    @examples(
        max_examples=EACH,
        deadline=None,
        database=None,
        phases=[Phase.explicit, Phase.generate],
        suppress_health_check=list(HealthCheck),
        derandomize=tally.QUICK,
    )
    @given(case=operation.as_strategy())
    def each(case: Case) -> None:
        call(case)

    each()


def _call(case: Case, role: str, headers: dict[str, str], signed_in: dict[str, str]) -> None:
    throttle._LocalThrottle.cache.clear()
    tally.tried("control API", role)
    point = transaction.savepoint()
    try:
        response = case.call(headers=headers, cookies=signed_in)
    except Exception as error:  # Django's handler turns what a view raises into a 500; this never got there
        if "UnicodeEncodeError" not in repr(error):
            tally.fault("crashes", f"{role}: {case.method} {case.path}: {error!r}")
        return
    finally:
        transaction.savepoint_rollback(point)
    ANSWERS[role, response.status_code] += 1
    judge(case, response, role)
