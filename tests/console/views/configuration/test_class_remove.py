"""Removing a class that is somebody's default: who it is, before and after, and what making it again leaves undone."""

from __future__ import annotations

import re

import pytest
from django.urls import reverse

from controller.models import Decision, SLOClass
from controller.services.slo.slo_classes import slo_class_update
from tests import factories

NOT_AGAIN = "Creating it again does not make it the default again"


@pytest.fixture
def row(db):
    return factories.slo_class(name="chat")


def address(row) -> str:
    return reverse("class-remove", args=[row.pk])


def test_the_page_names_the_tenants_whose_default_it_is(operator, row):
    acme = factories.tenant(name="acme", default_class=row)
    factories.tenant(name="globex", default_class=row)
    factories.tenant(name="initech")
    html = operator.get(address(row)).content.decode()
    assert f'<a href="{reverse("tenant", args=[acme.pk])}">acme</a>, ' in html
    assert ">globex</a>" in html
    assert "initech" not in html
    assert NOT_AGAIN in html


def test_the_page_says_nothing_of_defaults_where_it_is_no_ones(operator, row):
    assert NOT_AGAIN not in operator.get(address(row)).content.decode()


@pytest.mark.parametrize("version", ["", "7"])
def test_a_refusal_names_them_too(operator, row, version):
    factories.tenant(name="acme", default_class=row)
    answer = operator.post(address(row), {"version": version})
    assert answer.status_code in (412, 422)
    assert ">acme</a>" in answer.content.decode()


def test_a_class_that_changed_meanwhile_stays_and_the_differences_are_shown(operator, row):
    slo_class_update(actor=factories.ACTOR, slo_class_id=row.pk, version=1, changes={"ttft_s": 7.5, "title": "Chats"})
    answer = operator.post(address(row), {"version": 1})
    html = answer.content.decode()
    assert answer.status_code == 412
    assert "What changed" in html
    assert re.search(r'title="ttft_s".*?<ins>7\.50? s</ins>', html, re.S)
    assert "<ins>Chats</ins>" in html
    assert '<th scope="row" title="tpot_s"' not in html
    assert SLOClass.objects.filter(pk=row.pk).exists()
    assert operator.post(address(row), {"version": 2}).status_code == 302


def test_what_was_done_says_whose_default_it_was(operator, row):
    tenants = [factories.tenant(name=name, default_class=row) for name in ("acme", "globex")]
    html = operator.post(address(row), {"version": 1}, follow=True).content.decode()
    assert "Class chat removed." in html
    assert f"acme, globex have no default class now. {NOT_AGAIN}." in html
    removal = Decision.objects.get(kind="slo_class_removed")
    assert f"{reverse('class-new')}?restore={removal.pk}" in html
    for tenant in tenants:
        tenant.refresh_from_db()
        assert (tenant.default_class, tenant.version) == (None, 2)


def test_one_tenant_has_none(operator, row):
    factories.tenant(name="acme", default_class=row)
    html = operator.post(address(row), {"version": 1}, follow=True).content.decode()
    assert "acme has no default class now." in html


def test_the_history_of_the_tenant_and_the_record_show_it(operator, viewer, row):
    tenant = factories.tenant(name="acme", default_class=row)
    operator.post(address(row), {"version": 1})
    assert b"default class none" in viewer.get(reverse("tenant", args=[tenant.pk])).content
    removal = Decision.objects.get(kind="slo_class_removed")
    html = viewer.get(reverse("decision", args=[removal.pk])).content.decode()
    assert "was the default class of" in html
    assert "acme" in html


def test_the_label_of_a_priority_is_refused_beside_the_name(operator):
    data = {"name": "priority-1", "ttft_s": "1", "tpot_s": "0.1", "waiting_time_s": "5", "target": "95", "value": "1"}
    answer = operator.post(reverse("class-new"), data)
    assert answer.status_code == 422
    assert "priority" in answer.content.decode().split('id="id_name_error"')[1].split("</ul>")[0]
