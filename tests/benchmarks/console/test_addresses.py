"""`bench-console` measures every page of the console: a new address needs its row."""

from __future__ import annotations

import pytest
from django.conf import settings
from django.test import Client
from django.urls import resolve

from benchmarks.console import addresses as told
from benchmarks.console.data import fill
from console.urls import urlpatterns
from controller.models import Experiment
from tests import factories
from tests.browser.every_page.test_tables import of_people, takes
from workers import live

# Steps of work that go on after their answer, measured for themselves or tested alone: they show no page.
NO_PAGES = {"preview", "audit-export"}


@pytest.fixture
def no_gateways(redis_server):
    """Pages show what is in Redis, where other tests leave fleets that no gateway would publish."""
    live._client(settings.REDIS_URL).flushdb()


def pages():
    return {name for name, view, fields in of_people() if takes("GET", view, fields)} - NO_PAGES


def missing(addresses):
    return pages() - {resolve(look.path.split("?")[0]).url_name for look in addresses.values()}


@pytest.mark.django_db(transaction=True)
def test_every_page_of_the_url_table_is_measured_and_answers(unsent_experiments, no_gateways):
    admin = Client()
    admin.force_login(factories.user("admin"))
    fill(records=500, decisions=2000, instances=10, hours=0.5)
    told.prepare()
    assert Experiment.objects.get().state == "done"
    addresses = told.addresses()
    assert missing(addresses) == set()
    assert missing({name: look for name, look in addresses.items() if name != "tenant, change"}) == {"tenant-edit"}
    for name, look in addresses.items():
        answer = admin.get(look.path) if look.posted is None else admin.post(look.path, look.posted)
        assert answer.status_code == 200, name
    for name in ("class, history", "mapping, history", "scaling, history"):
        assert b"?restore=" in admin.get(addresses[name].path).content, name
    for name in ("class, last hour re-judged", "mapping, last hour re-judged"):
        said = admin.post(addresses[name].path, addresses[name].posted).json()
        assert said["errors"] == {}
        assert "would be attained" in said["html"], name


def test_no_address_is_left_out_by_a_name_that_is_not_there():
    assert {each.name for each in urlpatterns if hasattr(each, "name")} >= NO_PAGES
