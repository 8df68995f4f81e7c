"""PostgreSQL away is a page that says so, and asks nothing of the database itself."""

from __future__ import annotations

import pytest
from django.db import OperationalError
from django.test import Client
from psycopg_pool import PoolTimeout

from console.settings import HSTS_S
from console.views.fleet import instances
from tests.console.live.live_data import NOON


@pytest.mark.parametrize("error", [OperationalError("gone"), PoolTimeout("none free")])
def test_a_page_without_its_database_answers_503_in_words(viewer, live_store, monkeypatch, error):
    def away():
        raise error

    monkeypatch.setattr(instances.topology, "places", away)
    answer = viewer.get("/fleet/")
    assert (answer.status_code, answer["retry-after"]) == (503, "3")
    assert b"The database is unavailable" in answer.content
    assert answer["content-security-policy"]


def test_a_poll_gets_the_same_as_json(viewer, live_store, monkeypatch):
    def away(**window):
        raise OperationalError("gone")

    monkeypatch.setattr("console.panels.history.attainment", away)
    answer = viewer.get("/overview/history/", headers={"accept": "application/json"})
    assert answer.status_code == 503
    assert answer.json()["message"].startswith("The database is unavailable")


def test_other_errors_stay_errors(viewer, live_store, monkeypatch):
    def broken():
        raise ZeroDivisionError(NOON)

    monkeypatch.setattr(instances.topology, "places", broken)
    with pytest.raises(ZeroDivisionError):
        viewer.get("/fleet/")


def test_with_https_only_plain_http_is_redirected_except_for_probes(settings, db):
    settings.SECURE_SSL_REDIRECT, settings.SECURE_HSTS_SECONDS = True, HSTS_S
    for path in ("/login/", "/api/v1/tenants", "/admin/login/"):
        answer = Client().get(path)
        assert (answer.status_code, answer["location"]) == (301, f"https://testserver{path}")
    for path in ("/healthz", "/metrics"):
        assert Client().get(path).status_code in (200, 503)
    answer = Client().get("/login/", secure=True)
    assert (answer.status_code, answer["strict-transport-security"]) == (200, f"max-age={HSTS_S}")
