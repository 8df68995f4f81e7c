"""The tables of pages and actions name all that the console has: a new address needs its row. No browser needed."""

from __future__ import annotations

from collections import defaultdict

import pytest
from django.contrib.auth.models import AnonymousUser
from django.test import RequestFactory
from django.urls import resolve
from django.urls.converters import IntConverter

from console.urls import urlpatterns
from tests.browser.every_page.pages import ACTIONS, PAGES, SAVED

# Answers to scripts and files; the pages that ask for them are tested with them.
PARTS = {
    "overview-history", "fleet-live", "instance-live", "instance-log-live", "scaling-live", "flows-live",
    "workflow-live", "preview", "experiment-csv",
    "experiment-json", "audit-export", "queue-command-ended",
}  # fmt: skip
# For machines: no person, no role; and for those who sign in.
OPEN = ("console.views.site.health", "console.views.site.metrics", "console.views.accounts.sign_in")


@pytest.fixture(autouse=True)
def _nothing_recorded(monkeypatch):
    """That a post of nobody is recorded is tested elsewhere; here is no database."""
    monkeypatch.setattr("console.access.refused_record", lambda request, reason: None)


def of_people():
    """Name, address and view of everything that asks who somebody is."""
    for each in urlpatterns:
        module = getattr(each.callback, "__module__", "") if hasattr(each, "callback") else ""
        if module.startswith("console.views.") and module not in OPEN:
            fields = {
                name: 1 if isinstance(converter, IntConverter) else "x"
                for name, converter in each.pattern.converters.items()
            }
            yield each.name, each.callback, {**fields, **each.default_args}


def takes(method, view, fields):
    """Whether the address knows the method. Anonymous people get no further than the login, so nothing is read."""
    request = RequestFactory().generic(method, "/")
    request.user = AnonymousUser()
    answer = view(request, **fields)
    assert answer.status_code == 405 or (answer.status_code, answer["location"][:7]) == (302, "/login/")
    return answer.status_code != 405


def names_of(rows):
    return {resolve(row.path.split("?")[0].format_map(defaultdict(lambda: "1"))).url_name for row in rows}


def test_every_page_is_in_the_table():
    known = {name for name, view, fields in of_people() if takes("GET", view, fields)}
    assert known - PARTS == names_of(row for row in PAGES if row.status == 200)


def test_every_action_is_in_the_table():
    known = {name for name, view, fields in of_people() if takes("POST", view, fields)}
    assert known == names_of(ACTIONS)


@pytest.mark.parametrize("rows", [ACTIONS, SAVED], ids=["actions", "files"])
def test_what_is_done_is_done_on_a_page_of_the_table(rows):
    names = {page.name for page in PAGES}
    assert {row.page if hasattr(row, "page") else row[0] for row in rows} <= names
