"""Every address of the console and of the control API, asked with what no page of ours would send: never a 500.

Addresses come from the URL configuration itself, so that a new one is tried as soon as it is there.
"""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Iterator
from typing import Any
from urllib.parse import quote

import pytest
from django.db import transaction
from django.test import Client
from django.urls import URLPattern, URLResolver, get_resolver

from api.control.access.throttle import _LocalThrottle
from tests import factories

NUL = "\x00"
TEXTS = (f"a{NUL}b", "\ud800", "😀" * 80, "'; --", "-1", "NaN", "1e400", "9" * 40, "²", "9" * 5000)
TYPED = (f"a{NUL}b", "😀" * 80, "1e400", "9" * 40)  # where each costs a whole form
MOMENTS = ("0001-01-01T00:00:00+23:59", "9999-12-31T23:59:59.999999-23:59")
NUMBERS = ("0", "9223372036854775808", "9" * 40)
# In addresses: bytes as they come, so that what is no UTF-8 is tried too.
PARTS = ("a%00b", "%ED%A0%80", "%F0%9F%98%80", quote("'; --"), "x" * 3000, "%0A")
NAMES = (
    "id", "with", "after", "at", "since", "until", "q", "kind", "actor", "actor_type", "subject", "subject_type",
    "tenant", "slo_class", "model", "instance", "outcome", "attained", "format", "restore", "next", "charts", "cursor",
    "limit", "window", "change", "version", "role", "name", "title", "request", "action", "priority", "key", "text",
    "scopes", "expires_at", "grace", "default_class", "rpm", "tpm", "ttft_s", "tpot_s", "deadline_s", "waiting_time_s",
    "target", "value", "upper", "lower", "min_instances", "max_instances", "levels-TOTAL_FORMS",
    "levels-INITIAL_FORMS", "levels-0-ttft_s", "window_age_s", "contention", "contenders-TOTAL_FORMS",
    "contenders-INITIAL_FORMS", "contenders-0-policy", "kept", "trace", "file", "simulate", "source", "count",
    "confirmed", "username", "password", "expected", "asked", "told", "order", "from", "to", "seed", "rate",
)  # fmt: skip
BODIES = (b"", b"\x00", b"[]", b'{"name": "\\u0000"}', b'{"name": "\\ud800"}', b"[" * 5000)


def addresses(patterns: list[Any], before: str = "") -> Iterator[str]:
    """Routes as they are written, with `<kind:name>` where something is to be filled in."""
    for each in patterns:
        route = before + str(each.pattern).removeprefix("^").removesuffix("$").removesuffix("\\Z")
        if isinstance(each, URLResolver):
            yield from addresses(each.url_patterns, route)
        elif isinstance(each, URLPattern):
            yield re.sub(r"\(\?P(<\w+>)[^)]*\)", r"\1", route)


ROUTES = sorted(set(addresses(get_resolver("console.urls").url_patterns)))
PAGES = [route for route in ROUTES if not route.startswith("admin/")]
ADMIN = [route for route in ROUTES if route.startswith("admin/") and "autocomplete" not in route]
ADMIN_FORM = re.compile(r"/(add|change|delete|history)/$")
OF_A_LIST = ("q=%00", "id__exact=%00", "at__gte=0001-01-01")  # forms read none of these
HOLE = re.compile(r"<(?:(\w+):)?(\w+)>")


@pytest.fixture
def rows(db: Any) -> dict[str, str]:
    """What addresses name, so that what is posted gets as far as a form."""
    return factories.addressed()


@pytest.fixture
def browser(db: Any) -> Client:
    """An admin, who gets furthest; a defect is an answer of 500 and not an exception of the test."""
    client = Client(raise_request_exception=False)
    client.force_login(factories.user("admin", is_staff=True, is_superuser=True))
    return client


def filled(route: str, parts: dict[str, Any], other: str) -> str:
    """The address with what is known of it, and `other` for the rest."""
    return "/" + HOLE.sub(lambda hole: str(parts.get(hole[2], other if hole[1] != "int" else "1")), route)


def hostile_paths(route: str) -> list[str]:
    if not HOLE.search(route):
        return []
    kinds = {hole[1] for hole in HOLE.finditer(route)}
    if kinds == {"int"}:
        return ["/" + HOLE.sub(number, route) for number in NUMBERS]
    return ["/" + HOLE.sub(part.replace("\\", ""), route) for part in PARTS]


def asked(client: Client, method: str, *args: Any, **kwargs: Any) -> int:
    """The status. In a savepoint, as each request has its own transaction in service."""
    _LocalThrottle.cache.clear()
    point = transaction.savepoint()
    answer = getattr(client, method)(*args, **kwargs)
    transaction.savepoint_rollback(point)
    return int(answer.status_code)


def turns(route: str) -> range:
    """A third of all turns of `mixed`: any three routes that follow each other try every text in every parameter."""
    return range(PAGES.index(route) % 3, len(TEXTS) + len(MOMENTS), 3)


def mixed(turn: int) -> dict[str, str]:
    """A text for each name, another one at each turn."""
    texts = (*TEXTS, *MOMENTS)
    return {name: texts[(place + turn) % len(texts)] for place, name in enumerate(NAMES)}


def quoted(text: str) -> str:
    return quote(text.encode("utf-8", "surrogatepass"))


def checked(answers: dict[str, int]) -> None:
    """503 is what a page says without Redis, which these tests do not have."""
    assert {what: status for what, status in answers.items() if status >= 500 and status != 503} == {}


@pytest.mark.sampled(30)
@pytest.mark.parametrize("route", [route for route in PAGES if HOLE.search(route)])
def test_a_hostile_address_is_not_found(browser, live_store, route):
    answers = {path[:80]: asked(browser, "get", path) for path in hostile_paths(route)}
    answers |= {f"post {path[:80]}": asked(browser, "post", path, {"version": "1"}) for path in hostile_paths(route)}
    checked(answers)
    named = {path: status for path, status in answers.items() if "%00" in path}
    assert {path: status for path, status in named.items() if not 400 <= status < 500} == {}


@pytest.mark.sampled(40)
@pytest.mark.parametrize("route", PAGES)
def test_a_hostile_query_is_no_defect(browser, live_store, rows, route):
    path = filled(route, rows, "x")
    queries = ["&".join(f"{name}={quoted(text)}" for name, text in mixed(turn).items()) for turn in turns(route)]
    alone = [f"{name}={quoted(text)}" for name in ("at", "since", "until") for text in MOMENTS]
    alone += [f"{name}={quoted(NUL)}" for name in ("id", "q", "tenant", "subject")]
    alone += ["restore=" + "9" * 18]
    for at in MOMENTS:
        place = base64.urlsafe_b64encode(json.dumps([at, "1"]).encode()).decode()
        alone += [f"after={place}", f"cursor={place}"]
    checked({f"?{query[:60]}": asked(browser, "get", f"{path}?{query}") for query in [*queries, *alone]})


@pytest.mark.sampled(40)
@pytest.mark.parametrize("route", [route for route in PAGES if route != "logout/"])
def test_a_hostile_body_is_no_defect(browser, live_store, rows, route):
    path = filled(route, rows, "x")
    answers = {}
    if path.startswith("/api/"):
        kinds: tuple[str, ...] = ("application/json",)
        texts: tuple[str, ...] = ()
    else:
        kinds, texts = ("application/json", "multipart/form-data; boundary=x"), (*TYPED, MOMENTS[1])
    for turn, text in enumerate(each.encode("utf-8", "replace").decode() for each in texts):
        if turn == PAGES.index(route) % len(texts):
            answers[f"form {text[:20]!r}"] = asked(browser, "post", path, dict.fromkeys(NAMES, text))
        usual = {"version": "1", "kind": "cancel", "role": "decode", "action": "drain", "state": "active",
                 "levels-TOTAL_FORMS": "1", "levels-INITIAL_FORMS": "1", "request": "r"}  # fmt: skip
        answers[f"rest {text[:20]!r}"] = asked(browser, "post", path, dict.fromkeys(NAMES, text) | usual)
    for body in BODIES:
        for kind in kinds:
            answers[f"{kind} {body[:20]!r}"] = asked(browser, "post", path, body, content_type=kind)
    if path.startswith("/api/"):
        for body in BODIES:
            for method in ("patch", "put", "delete"):
                answers[f"{method} {body[:20]!r}"] = asked(
                    browser, method, path, body, content_type="application/json", headers={"if-match": "9" * 40}
                )
    checked(answers)


def test_the_admin_site_too(browser, live_store):
    answers = {}
    for route in ADMIN:
        for path in hostile_paths(route) or ["/" + route]:
            answers[path[:100]] = asked(browser, "get", path)
        for query in (f"_changelist_filters={NUL}", *(() if ADMIN_FORM.search(route) else OF_A_LIST)):
            answers[f"{route}?{query}"] = asked(browser, "get", f"{filled(route, {}, 'x')}?{query}")
    checked(answers)
