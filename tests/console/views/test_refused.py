"""What must not get in: forged and expired forms and sessions, posts of viewers, other tenants' ids, markup."""

from __future__ import annotations

import pytest
from django.db import connection
from django.test import Client
from django.urls import reverse

from controller.models import ApiKey, Decision, Experiment, Instance, PersonSession, SLOClass
from controller.services.decisions import decision_record
from controller.services.records.requests import records_write
from tests import factories

EVIL = "<script>window.evil=1</script>\"'><img src=x onerror=alert(1)>"


@pytest.fixture
def strict(db):
    """A signed-in operator whose forms need their token."""
    client = Client(enforce_csrf_checks=True)
    client.force_login(factories.user("admin"))
    return client


def posts(row, key, policy, instance, mapping):
    return {
        reverse("class-new"): {"name": "forged", "ttft_s": "9", "tpot_s": "1"},
        reverse("class-preview", args=[row.pk]): {"ttft_s": "9"},
        reverse("mapping-edit", args=[mapping.pk]): {"version": 1},
        reverse("instance-new"): {"id": "forged"},
        reverse("instance-start"): {"id": "forged"},
        reverse("scaling-new"): {"upper": "9"},
        reverse("instance-edit", args=[instance.pk]): {"unit_cost": "9", "version": 1},
        reverse("instance-role", args=[instance.pk]): {"role": "decode", "version": 1},
        reverse("experiment-new"): {"name": "forged"},
        reverse("experiment-ask"): {"window": "hour", "change": "less"},
        reverse("class-edit", args=[row.pk]): {"ttft_s": "9"},
        reverse("class-remove", args=[row.pk]): {"version": 1},
        reverse("tenant-new"): {"name": "forged"},
        reverse("key-new", args=[key.tenant_id]): {"name": "forged", "scopes": ["read"]},
        reverse("key-revoke", args=[key.pk]): {},
        reverse("key-rotate", args=[key.pk]): {"grace": "0"},
        reverse("scaling-edit", args=[policy.pk]): {"upper": "9"},
        reverse("scaling-hold", args=[policy.pk]): {"instances": "9", "hours": "1.0", "reason": "x", "version": 1},
        reverse("instance-act"): {"instance": instance.pk, "action": "stop", "version": 1},
        reverse("queue-command"): {"kind": "cancel", "request": "req-1"},
    }


@pytest.fixture
def targets(db):
    mapping = factories.priority_mapping()
    key, policy, instance = factories.api_key().key, factories.scaling_policy(), factories.instance()
    return posts(factories.slo_class(), key, policy, instance, mapping)


def unchanged():
    assert not SLOClass.objects.filter(ttft_s=9).exists()
    assert ApiKey.objects.filter(revoked_at__isnull=False).count() == 0
    assert ApiKey.objects.count() == 1
    assert not Instance.objects.exclude(role="collocated", desired_state="running").exists()
    assert not Experiment.objects.exists()


def test_a_form_without_or_with_a_forged_token_changes_nothing(strict, targets):
    for url, data in targets.items():
        for token in ({}, {"csrfmiddlewaretoken": "x" * 64}):
            answer = strict.post(url, {**data, **token})
            assert answer.status_code == 403, url
            assert b"The form could not be verified" in answer.content
    unchanged()


def test_a_session_that_ended_leads_to_the_login_and_changes_nothing(targets):
    client = Client()
    client.force_login(factories.user("admin"))
    PersonSession.objects.all().delete()
    for url, data in targets.items():
        answer = client.post(url, data)
        assert (answer.status_code, answer["location"].split("?")[0]) == (302, "/login/"), url
    unchanged()


def test_a_forged_session_cookie_signs_no_one_in(db, settings):
    client = Client()
    client.cookies[settings.SESSION_COOKIE_NAME] = "a" * 32
    assert client.get("/")["location"].startswith("/login/")


def test_a_viewers_posts_are_refused_and_recorded_one_by_one(viewer, targets):
    for url, data in targets.items():
        assert viewer.post(url, data).status_code == 403, url
    assert Decision.objects.filter(kind="access_refused").count() == len(targets)
    unchanged()


@pytest.mark.parametrize(
    "path", ["/tenants/99999/", "/scaling/99999/", "/audit/99999/", "/fleet/instances/x/", "/requests/x/"]
)
def test_an_id_that_is_not_there_is_a_page_that_says_so(operator, live_store, path):
    answer = operator.get(path)
    assert answer.status_code == 404
    assert b"not found" in answer.content


def test_a_class_of_another_tenant_cannot_become_a_default(signed_in):
    mine, theirs = factories.tenant(), factories.slo_class(tenant=factories.tenant())
    data = {"default_class": theirs.pk, "state": "active", "version": 1}
    assert signed_in("admin").post(reverse("tenant-edit", args=[mine.pk]), data).status_code == 422


def test_markup_in_names_reasons_and_records_is_text_on_every_page(viewer, live_store):
    tenant = factories.tenant(title=EVIL[:100])
    decision = decision_record(
        actor=factories.ACTOR, kind="slo_class_updated", subject_type="slo_class", subject=EVIL, reason=EVIL,
        inputs={"before": {"title": EVIL}, "after": {"title": EVIL + "!"}, EVIL: EVIL}, rejected={EVIL: EVIL},
        request_id="req-evil",
    )  # fmt: skip
    step = {"kind": EVIL, "reason": EVIL, "at": 0.1, "figures": {EVIL: EVIL}, "rejected": {EVIL: EVIL}}
    record = factories.record(
        id="req-evil", tenant=EVIL[:60], slo_class=EVIL[:60], model=EVIL, error_code=EVIL[:60], workflow=EVIL,
        decisions=[step],
    )  # fmt: skip
    connection.ensure_connection()
    records_write(connection=connection.connection, records=[record])
    pages = [
        "/", "/requests/", "/requests/req-evil/", "/requests/compare/?id=req-evil&id=req-evil", "/tenants/",
        reverse("tenant", args=[tenant.pk]), "/audit/", reverse("decision", args=[decision.pk]), "/scaling/",
        f"/audit/?q={EVIL}", f"/requests/?tenant={EVIL}&id={EVIL}", "/overview/history/",
    ]  # fmt: skip
    for path in pages:
        answer = viewer.get(path)
        assert answer.status_code == 200, path
        if answer["content-type"].startswith("text/html"):
            html = answer.content.decode()
            assert "<script>window.evil" not in html, path
            assert "<img src=x" not in html, path
