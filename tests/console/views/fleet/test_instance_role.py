"""Another role for an instance: asked first, done and audited, refused with its reason, by role and by version."""

from __future__ import annotations

import pytest
from django.urls import reverse

from controller.models import Decision, Instance
from tests import factories


@pytest.fixture(autouse=True)
def told(monkeypatch):
    notices = []
    monkeypatch.setattr("console.views.fleet.role.announce_config", lambda: notices.append(1))
    return notices


@pytest.fixture
def row(db):
    row = factories.instance(id="engine-x")
    factories.instance(id="engine-y", model=row.model)
    return row


def post(client, row, role, version=None):
    url = reverse("instance-role", args=[row.pk])
    return client.post(url, {"role": role, "version": row.version if version is None else version}, follow=True)


def test_the_page_says_what_would_happen_and_what_cannot(operator, row):
    html = operator.get(reverse("instance-role", args=[row.pk])).content.decode()
    assert "It only decodes" in html
    assert "Change another instance to decode first" in html
    assert html.count("disabled") == 1


def test_a_role_is_set_audited_and_told_to_the_gateways(operator, row, told):
    html = post(operator, row, "decode").content.decode()
    assert "The role of engine-x is now decode" in html
    row.refresh_from_db()
    assert row.role == "decode"
    decision = Decision.objects.get(kind="instance_role_set")
    assert decision.inputs["before"] == {"role": "collocated"}
    assert decision.actor_type == "person"
    assert told == [1]


def test_what_is_impossible_is_refused_with_its_reason(operator, row, told):
    html = post(operator, row, "prefill").content.decode()
    assert "has no decode instance" in html
    assert Instance.objects.get(pk=row.pk).role == "collocated"
    assert told == []


def test_the_second_of_two_operators_changes_nothing(operator, row):
    post(operator, row, "decode")
    answer = post(operator, row, "collocated", version=row.version)
    assert answer.status_code == 412
    assert "has changed since you opened the page. Nothing was done" in answer.content.decode()
    assert Instance.objects.get(pk=row.pk).role == "decode"


@pytest.mark.parametrize(
    "form",
    [
        {"role": "chef", "version": "1"},
        {"role": "decode"},
        {"role": "decode", "version": "x"},
        {"role": "decode", "version": "²"},
        {"role": "decode", "version": "9" * 5000},
    ],
)
def test_nonsense_is_refused(operator, row, form):
    assert operator.post(reverse("instance-role", args=[row.pk]), form).status_code == 400


def test_a_viewer_neither_sees_nor_does_it(viewer, row):
    url = reverse("instance-role", args=[row.pk])
    assert viewer.get(url).status_code == 403
    assert viewer.post(url, {"role": "decode", "version": row.version}).status_code == 403
    assert Decision.objects.filter(kind="access_refused").count() == 1


def test_an_unknown_instance_is_not_found(operator, db):
    assert operator.get(reverse("instance-role", args=["nobody"])).status_code == 404
