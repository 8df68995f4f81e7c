"""Every route of both servers has a rule, and every caller meets it. Routes come from the URL tables themselves."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from django.contrib.auth.models import AnonymousUser, Permission, User
from django.db import transaction
from django.test import Client

from api.control.access.scopes import OF_RESOURCE, scope_missing
from api.openai.app import OpenAIApp
from console.consumers.routing import websocket_urlpatterns
from controller.models import ServiceAccount
from tests import factories
from tests.access import rules
from tests.access.rules import ANYONE, NONE, PEOPLE, REACH, SUPERUSER
from tests.access.table import text
from tests.api.openai.gateways import KEY, TestBed
from tests.console.conftest import live_store  # noqa: F401
from tests.console.consumers.socket import Browser
from tests.console.test_hostile import HOLE, ROUTES, filled

OUTSIDE = {"healthz", "metrics"}  # of both servers: rules.STATUS
DOCUMENT = Path(__file__).resolve().parents[2] / "docs/reference/access.md"
PEOPLE_HERE = [route for route in ROUTES if not route.startswith(("admin/", "api/v1/")) and route not in OUTSIDE]
ADMIN_SITE = [route for route in ROUTES if route.startswith("admin/")]
MODELS = [route for route in ADMIN_SITE if route.count("/") >= 3 and "<app_label>" not in route]


def test_every_page_has_a_rule():
    assert set(rules.PAGES) == set(PEOPLE_HERE)


def test_every_topic_has_a_rule():
    known = [str(each.pattern) for each in websocket_urlpatterns]
    assert known.pop() == ""  # the last one refuses everything else
    assert set(rules.SOCKETS) == set(known)


def test_every_address_of_the_gateway_has_a_rule():
    app = OpenAIApp(None, None)
    assert set(rules.GATEWAY) | set(rules.STATUS) == {*app.routes, *app.prefixes}


def test_the_document_is_current():
    assert DOCUMENT.read_text() == text(), "run: .venv/bin/python -m tests.access.table > docs/reference/access.md"


# ---- pages -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def rows(db: Any) -> dict[str, Any]:
    """What addresses name."""
    return {**factories.addressed(), "order_id": "0" * 32}


def browser(role: str, **flags: bool) -> Client:
    client = Client(raise_request_exception=False)
    if role != "nobody":
        client.force_login(factories.user("" if role == "no role" else role, **flags))
    return client


def outcome(client: Client, method: str, path: str) -> str:
    """in, out (403), sign in, or none (405). Nothing of the call stays in the database."""
    point = transaction.savepoint()
    answer = getattr(client, method)(path)
    transaction.savepoint_rollback(point)
    where = answer.headers.get("location", "")
    if answer.status_code == 302 and where.startswith(("/login/?next=", "/admin/login/?next=")):
        return "sign in"
    return {403: "out", 401: "out", 405: "none"}.get(answer.status_code, "in")


@pytest.mark.db
@pytest.mark.parametrize("route", sorted(rules.PAGES))
def test_a_page_lets_in_whom_its_rule_names(rows, live_store, route):  # noqa: F811
    path, rule = filled(route, rows, "x"), rules.PAGES[route]
    clients = {who: browser(who) for who in PEOPLE}
    for method, least in (("get", rule.read), ("post", rule.send)):
        found = {who: outcome(client, method, path) for who, client in clients.items()}
        if least == NONE:
            assert set(found.values()) == {"none"}, method
            continue
        allowed = PEOPLE[REACH[least] :]
        wanted = {who: "in" if who in allowed else "sign in" if who == "nobody" else "out" for who in PEOPLE}
        assert found == wanted, method


@pytest.mark.db
def test_keys_and_tokens_open_no_page(rows, live_store):  # noqa: F811
    from tests.api.control.test_service_accounts import token

    secrets = (factories.api_key().secret, token(role="admin").secret)
    for route, rule in rules.PAGES.items():
        for secret in secrets:
            client = Client(raise_request_exception=False, headers={"Authorization": f"Bearer {secret}"})
            for method, least in (("get", rule.read), ("post", rule.send)):
                if least not in (ANYONE, NONE):
                    assert outcome(client, method, filled(route, rows, "x")) == "sign in", (method, route)


# ---- admin site ------------------------------------------------------------------------------------------------------


def admin_rule(route: str) -> rules.Rule:
    return max((each for each in rules.ADMIN_SITE.items() if route.startswith(each[0])), key=lambda each: len(each[0]))[
        1
    ]


@pytest.mark.sampled(60)
@pytest.mark.db
@pytest.mark.parametrize("route", ADMIN_SITE)
def test_the_admin_site_is_for_staff_and_changes_people_alone(rows, route):
    rule, path = admin_rule(route), filled(route, {"id": "1"}, "1")
    closed = {who: outcome(browser(who), "get", path) for who in ("nobody", "admin")}
    closed["staff without a role"] = outcome(browser("no role", is_staff=True), "get", path)
    if rule.read == ANYONE or route == "admin/logout/":
        assert closed["nobody"] == ("in" if route == "admin/logout/" else "sign in")  # the console's own form
        return
    assert set(closed.values()) == {"sign in"}
    staff, superuser = browser("viewer", is_staff=True), browser("no role", is_staff=True, is_superuser=True)
    people = browser("admin", is_staff=True)
    edits = route in MODELS and route.endswith(("add/", "delete/", "change/", "password/"))
    if rule.read == SUPERUSER:
        for client in (people, permitted()):
            assert outcome(client, "get", path) == "out" or not (edits or not HOLE.search(route))
        assert outcome(superuser, "get", path) == "in"
    elif edits:
        assert {outcome(client, "post", path) for client in (staff, superuser)} == {"out"}
    else:
        assert outcome(staff, "get", path) in ("in", "out" if route == "admin/autocomplete/" else "in")


def permitted() -> Client:
    """An admin with the staff flag and every permission that Django's tables know, set from a shell."""
    person = factories.user("admin", is_staff=True)
    person.user_permissions.set(Permission.objects.all())
    client = Client(raise_request_exception=False)
    client.force_login(person)
    return client


# ---- live topics -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", sorted(rules.SOCKETS))
async def test_a_topic_is_closed_to_whom_its_rule_does_not_name(path, monkeypatch):
    """From `viewer` on they are open: tests/console/consumers."""
    from console.consumers import base

    consumer = next(each.callback for each in websocket_urlpatterns if str(each.pattern) == path)
    assert consumer.consumer_class.minimum_role.name.lower() == rules.SOCKETS[path]
    monkeypatch.setattr(base, "role_of", lambda user: base.UserRole.NONE)
    for user in (AnonymousUser(), User(username="somebody")):
        socket = Browser(consumer, f"/{path}")
        socket.scope["user"] = user
        assert not await socket.connect()


# ---- control API -----------------------------------------------------------------------------------------------------
# Roles and keys: tests/api/control/test_access.py and test_service_accounts.py, by the same rules. Here each scope.


@pytest.mark.db
@pytest.mark.parametrize("scope", ServiceAccount.Scope.values)
def test_a_scope_opens_what_the_table_says_and_nothing_else(db, scope):
    from tests.api.control.test_service_accounts import caller

    program = caller(role="admin", scopes=[scope])
    for method, path in rules.CONTROL:
        resource = path.split("/")[1]
        allowed = OF_RESOURCE.get(resource) == scope or (method == "get" and scope == "read")
        point = transaction.savepoint()
        status = getattr(program, method)(path).status_code
        transaction.savepoint_rollback(point)
        assert (status != 403) is allowed, (method, path, status)
        assert bool(scope_missing([scope], method.upper(), f"/api/v1{path}")) is not allowed


# ---- gateway ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", sorted(rules.GATEWAY))
async def test_the_data_path_needs_a_key_with_the_scope(path):
    methods, _ = rules.GATEWAY[path]
    path = path if not path.endswith("/") else f"{path}demo"
    async with TestBed() as bed:
        for method in methods.split(", "):
            for wrong in ("", "sk-unknown", "slk-" + 43 * "x"):
                assert (await bed.ask(b"{}", path, key=wrong, method=method)).status == 401, wrong
        answer = await bed.ask(b"{}", path, key=KEY, method=methods.split(", ")[0])
        # A gateway that runs alone keeps no workflows (503), and this tenant no responses (404).
        assert answer.status in (200, 400, 503) or answer.error["param"] == "response_id", answer.body
        other = next(method for method in ("GET", "POST", "PUT") if method not in methods)
        assert (await bed.ask(b"{}", path, key=KEY, method=other)).status == 405
