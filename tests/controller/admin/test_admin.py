"""The admin site: who sees what, that nothing of ours can be changed there, and the export."""

from __future__ import annotations

import csv
import io
from datetime import UTC, datetime, timedelta

import pytest
from django.contrib import admin
from django.contrib.auth.models import User
from django.test import AsyncClient
from django.utils import timezone

from controller.admin import base
from controller.models import Decision
from controller.services.actors import Actor
from controller.services.decisions import decision_record
from tests import factories

pytestmark = pytest.mark.django_db

DECISIONS = "/admin/controller/decision/"


def decide(**fields) -> Decision:
    defaults = {
        "actor": Actor.job("scaler"),
        "kind": "scale_out",
        "subject_type": "scaling_policy",
        "subject": "demo",
        "reason": "load_above_upper",
    }
    return decision_record(**{**defaults, **fields})


@pytest.fixture
def staff(client):
    client.force_login(factories.user("viewer", is_staff=True))
    return client


@pytest.fixture
def superuser(client):
    client.force_login(factories.user(is_staff=True, is_superuser=True, username="root"))
    return client


def test_people_without_staff_status_are_sent_to_the_login(client):
    client.force_login(factories.user("admin"))

    assert client.get(DECISIONS).status_code == 302


@pytest.mark.parametrize("path", ["/admin/", DECISIONS, f"{DECISIONS}export/", "/admin/jsi18n/"])
def test_the_staff_flag_without_a_role_opens_nothing(client, path):
    decide(inputs={"load": 0.93})
    person = factories.user(is_staff=True)
    client.force_login(person)
    assert (client.get(path).status_code, client.get(path)["location"]) == (302, f"/admin/login/?next={path}")
    refused = client.get(client.get(path)["location"])
    assert refused.status_code == 403
    assert b"The admin site requires a staff account with the viewer role." in refused.content


def test_a_role_that_is_taken_away_closes_the_admin_site_at_the_next_call(client):
    person = factories.user("operator", is_staff=True)
    client.force_login(person)
    assert client.get(DECISIONS).status_code == 200
    person.groups.clear()
    assert client.get(DECISIONS).status_code == 302


OURS = sorted(
    (model._meta.model_name, model) for model in admin.site._registry if model._meta.app_label == "controller"
)


def test_the_site_has_all_tables():
    assert len(OURS) >= 15


@pytest.mark.parametrize(("name", "model"), OURS, ids=[name for name, _ in OURS])
def test_every_table_of_ours_can_be_seen_and_not_changed(superuser, name, model):
    request = superuser.get(f"/admin/controller/{name}/").wsgi_request
    site = admin.site._registry[model]

    assert superuser.get(f"/admin/controller/{name}/").status_code == 200
    assert superuser.get(f"/admin/controller/{name}/add/").status_code == 403
    assert site.has_view_permission(request)
    assert site.has_change_permission(request) is False
    assert site.has_delete_permission(request) is False


def test_a_decision_is_shown_and_a_post_to_it_refused(staff):
    decision = decide(inputs={"load": 0.93})

    assert b"0.93" in staff.get(f"{DECISIONS}{decision.pk}/change/").content
    assert staff.post(f"{DECISIONS}{decision.pk}/change/", {"reason": "other"}).status_code == 403
    assert staff.post(f"{DECISIONS}{decision.pk}/delete/", {"post": "yes"}).status_code == 403


@pytest.mark.parametrize(
    ("query", "found"),
    [
        ("kind=scale_out", ["demo"]),
        ("actor=olga", ["interactive"]),
        ("subject_type=slo_class", ["interactive"]),
        ("within=1h", ["demo"]),
        ("q=interactive", ["interactive"]),
        ("actor_type__exact=job", ["demo"]),
        ("at__gte=2020-01-01T00:00Z&at__lt=2020-02-01T00:00Z", ["old"]),
        ("kind=nothing", []),
    ],
)
def test_decisions_are_filtered(staff, query, found):
    decide()
    decide(
        actor=Actor.person("olga"),
        kind="slo_class_updated",
        subject_type="slo_class",
        subject="interactive",
        at=timezone.now() - timedelta(hours=2),
    )

    decide(
        kind="old", subject_type="old", subject="old", actor=Actor.gateway("old"), at=datetime(2020, 1, 15, tzinfo=UTC)
    )

    response = staff.get(f"{DECISIONS}?{query}")

    assert [row.subject for row in response.context["cl"].result_list] == found


def test_a_list_counts_a_bounded_number_of_rows(staff, monkeypatch):
    monkeypatch.setattr(base, "ROWS_PAGED", 3)
    for _ in range(5):
        decide()

    assert staff.get(DECISIONS).context["cl"].paginator.count == 3


def test_no_secret_of_a_key_is_shown(staff):
    new = factories.api_key()

    page = staff.get(f"/admin/controller/apikey/{new.key.pk}/change/").content.decode()

    assert new.key.prefix in page
    assert new.key.sha256 not in page


@pytest.mark.django_db(transaction=True)
async def test_the_export_streams_what_the_filters_leave(monkeypatch):
    from asgiref.sync import sync_to_async

    monkeypatch.setattr("controller.selectors.exports.CHUNK", 2)
    for number in range(5):
        await sync_to_async(decide)(subject=f"={number}", inputs={"load": number})
    await sync_to_async(decide)(kind="scale_in")
    client = AsyncClient()
    await client.aforce_login(await sync_to_async(factories.user)("viewer", is_staff=True))

    response = await client.get(f"{DECISIONS}export/?kind=scale_out")
    text = b"".join([part async for part in response]).decode()

    rows = list(csv.DictReader(io.StringIO(text)))
    assert response["Content-Disposition"].startswith('attachment; filename="decision-')
    assert [row["subject"] for row in rows] == ["'=4", "'=3", "'=2", "'=1", "'=0"]
    assert rows[0]["inputs"] == '{"load": 4}'


def test_a_change_of_a_person_is_audited_without_the_password(superuser):
    group = factories.Group.objects.get(name="operator")
    fields = {"username": "nina", "password1": "correct-horse-9", "password2": "correct-horse-9"}
    superuser.post("/admin/auth/user/add/", {**fields, "usable_password": "true"})
    nina = User.objects.get(username="nina")
    dates = {"date_joined_0": "2026-01-01", "date_joined_1": "00:00:00"}

    superuser.post(
        f"/admin/auth/user/{nina.pk}/change/", {"username": "nina", "is_active": "on", "groups": [group.pk], **dates}
    )

    created, updated = Decision.objects.filter(subject_type="person").order_by("id")
    assert (created.kind, created.actor) == ("person_created", "root")
    assert updated.inputs["after"]["roles"] == ["operator"]
    assert "horse" not in str(created.inputs) + str(updated.inputs)
