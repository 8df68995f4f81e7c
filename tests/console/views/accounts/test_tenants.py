"""Tenants and keys: who may look and change, quotas against use, a key shown once, revoked, rotated; conflicts."""

from __future__ import annotations

import time
from datetime import timedelta

import pytest
from django.db import connection
from django.urls import reverse
from django.utils import timezone

from controller.models import ApiKey, Decision, Tenant
from controller.models.tenants import secret_digest
from controller.services.records.requests import records_write
from controller.services.slo.api_keys import api_key_revoke, api_key_rotate
from tests import factories
from tests.console.live.live_data import fleet


def test_the_list_shows_quotas_and_what_was_served(viewer):
    now = timezone.now()
    tenant = factories.tenant(name="quoted", rpm=2, title="<b>Title</b>")
    records = [factories.record(tenant="quoted", arrived_at=now.timestamp() - 120, attained=n > 0) for n in range(3)]
    records_write(connection=connection.connection, records=records)
    html = viewer.get(reverse("tenants")).content.decode()
    assert "quoted" in html
    assert "66.7 %" in html
    assert '<span class="miss">3</span>' in html
    assert '<span class="sub">quota 2</span>' in html
    assert "<b>Title" not in html
    assert "&lt;b&gt;Title" in html
    page = viewer.get(reverse("tenant", args=[tenant.pk])).content.decode()
    assert "the allowed misses" in page
    assert "interactive" in page
    assert "Create key" not in page
    assert "Edit</a>" not in page


def test_requests_at_once_stand_against_their_quota(viewer, live_store):
    tenant = factories.tenant(name="quoted", max_concurrency=8)
    pages = reverse("tenants"), reverse("tenant", args=[tenant.pk])
    for page in pages:
        assert 'data-limit="8">' in viewer.get(page).content.decode()
        assert "<span data-used>–</span>" in viewer.get(page).content.decode(), "no gateway reports"
    now = time.time()
    live_store.fleets = [
        fleet(at=now, tenants={"quoted": 5}),
        fleet(at=now, gateway="gateway-2", tenants={"quoted": 2, "other": 9}),
        fleet(at=now - 60, gateway="gateway-3", tenants={"quoted": 100}),
    ]
    for page in pages:
        assert "<span data-used>7</span>" in viewer.get(page).content.decode()


def test_a_key_is_shown_once_and_kept_as_a_digest(admin):
    tenant = factories.tenant()
    answer = admin.post(reverse("key-new", args=[tenant.pk]), {"name": "batch job", "scopes": ["inference"]})
    assert answer.status_code == 201
    assert answer["cache-control"] == "no-store"
    key = ApiKey.objects.get(tenant=tenant)
    secret = answer.context["made"].secret
    assert secret in answer.content.decode()
    assert key.sha256 == secret_digest(secret)
    assert key.scopes == ["inference"]
    again = admin.get(reverse("tenant", args=[tenant.pk])).content.decode()
    assert secret not in again
    assert key.prefix in again
    decision = Decision.objects.get(kind="api_key_created", actor_type="person")
    assert secret not in str(decision.inputs)
    assert key.sha256 not in str(decision.inputs)


@pytest.mark.parametrize(
    ("data", "field"),
    [
        ({"name": "", "scopes": ["read"]}, "name"),
        ({"name": "k", "scopes": []}, "scopes"),
        ({"name": "k", "scopes": ["root"]}, "scopes"),
        ({"name": "k", "scopes": ["read"], "expires_at": "2020-01-01T00:00"}, "expires_at"),
    ],
)
def test_a_wrong_key_names_its_field(admin, data, field):
    answer = admin.post(reverse("key-new", args=[factories.tenant().pk]), data)
    assert answer.status_code == 422
    assert field in answer.context["key_form"].errors
    assert not ApiKey.objects.exists()


def test_revoking_is_for_good_and_audited(admin):
    made = factories.api_key()
    answer = admin.post(reverse("key-revoke", args=[made.key.pk]), follow=True)
    assert b"Gateways refuse it within a second" in answer.content
    made.key.refresh_from_db()
    assert made.key.revoked_at is not None
    admin.post(reverse("key-revoke", args=[made.key.pk]))
    assert Decision.objects.filter(kind="api_key_revoked").count() == 1


def test_rotating_makes_a_successor_and_ends_the_old_key(admin):
    made = factories.api_key(scopes=["inference"])
    answer = admin.post(reverse("key-rotate", args=[made.key.pk]), {"grace": "3600"})
    new = answer.context["made"]
    made.key.refresh_from_db()
    assert new.secret != made.secret
    assert new.key.scopes == ["inference"]
    assert new.key.name == made.key.name
    left = made.key.expires_at - timezone.now()
    assert timedelta(minutes=59) < left <= timedelta(hours=1)
    assert made.key.revoked_at is None
    rotated = Decision.objects.get(kind="api_key_rotated")
    assert rotated.inputs["successor"] == new.key.prefix
    at_once = admin.post(reverse("key-rotate", args=[new.key.pk]), {"grace": "0"})
    new.key.refresh_from_db()
    assert at_once.status_code == 201
    assert new.key.revoked_at is not None
    assert Decision.objects.filter(kind="api_key_rotated").count() == 2, "also where the old key ends at once"


def test_a_dead_key_has_no_successor(admin):
    made = factories.api_key()
    api_key_revoke(actor=factories.ACTOR, key_id=made.key.pk)
    answer = admin.post(reverse("key-rotate", args=[made.key.pk]), {"grace": "0"}, follow=True)
    assert b"cannot be rotated" in answer.content
    assert ApiKey.objects.count() == 1
    assert admin.post(reverse("key-rotate", args=[made.key.pk]), {"grace": "99"}, follow=True).status_code == 200
    assert ApiKey.objects.count() == 1


def test_grace_never_lengthens_a_life(db):
    ends = timezone.now() + timedelta(minutes=5)
    made = factories.api_key(expires_at=ends)
    api_key_rotate(actor=factories.ACTOR, key_id=made.key.pk, grace=timedelta(days=7))
    made.key.refresh_from_db()
    assert made.key.expires_at == ends


def test_a_tenant_is_made_and_changed(admin):
    own = factories.slo_class()
    answer = admin.post(reverse("tenant-new"), {"name": "newcomer", "rpm": "60", "default_class": own.pk})
    tenant = Tenant.objects.get(name="newcomer")
    assert answer["location"] == reverse("tenant", args=[tenant.pk])
    assert (tenant.rpm, tenant.tpm, tenant.default_class, tenant.highest_priority) == (60, None, own, 0)
    change = {"rpm": "", "tpm": "5000", "state": "suspended", "version": tenant.version, "title": "x"}
    assert admin.post(reverse("tenant-edit", args=[tenant.pk]), change).status_code == 302
    tenant.refresh_from_db()
    assert (tenant.rpm, tenant.tpm, tenant.state, tenant.default_class) == (None, 5000, "suspended", None)


def test_the_form_of_a_new_tenant_suggests_quotas(admin, settings):
    settings.NEW_TENANT_RPM, settings.NEW_TENANT_TPM, settings.NEW_TENANT_CONCURRENCY = 61, None, 7
    form = admin.get(reverse("tenant-new")).context["form"]
    assert [form[name].value() for name in ("rpm", "tpm", "max_concurrency")] == [61, None, 7]


def test_entitlements_are_chosen_shown_and_kept(admin):
    factories.slo_class(name="chat")
    factories.slo_class(name="theirs", tenant=factories.tenant())
    tenant = factories.tenant(allowed_models=["removed"])
    url = reverse("tenant-edit", args=[tenant.pk])
    form = admin.get(url).context["form"]
    names = [name for name, _ in form.fields["allowed_classes"].choices]
    assert "chat" in names
    assert "theirs" not in names
    change = {
        "allowed_classes": ["chat"],
        "allowed_models": ["removed"],
        "highest_priority": "2",
        "tightest_ttft_s": "0.25",
        "queue_share": "12.5",
        "retention_s": "7200",
        "stage_deadlines": "own_share",
        "state": "active",
        "version": 1,
    }
    assert admin.post(url, change).status_code == 302
    tenant.refresh_from_db()
    assert (tenant.allowed_classes, tenant.allowed_models) == (["chat"], ["removed"])
    assert (tenant.highest_priority, tenant.tightest_ttft_s, tenant.queue_share) == (2, 0.25, 0.125)
    page = admin.get(reverse("tenant", args=[tenant.pk])).content.decode()
    assert tenant.retention_s == 7200
    for shown in (
        "Entitlements",
        "2 (smaller numbers are refused)",
        "250",
        "12",
        "fixed lengths",
        "7,200 s: steps with a key, and responses with their conversations",
    ):
        assert shown in page
    answer = admin.post(url, {**change, "version": 2, "queue_share": "150"})
    assert answer.status_code == 422
    assert list(answer.context["form"].errors) == ["queue_share"]
    answer = admin.post(url, {**change, "version": 2, "retention_s": "700000"})
    assert list(answer.context["form"].errors) == ["retention_s"]
    answer = admin.post(url, {**change, "version": 2, "stage_deadlines": "even"})
    assert list(answer.context["form"].errors) == ["stage_deadlines"]
    assert admin.post(url, {**change, "version": 2, "retention_s": "", "stage_deadlines": ""}).status_code == 302
    tenant.refresh_from_db()
    assert (tenant.retention_s, tenant.stage_deadlines) == (0, "own_share")


def test_another_tenants_class_is_no_default(admin):
    theirs = factories.slo_class(tenant=factories.tenant())
    tenant = factories.tenant()
    data = {"default_class": theirs.pk, "state": "active", "version": tenant.version}
    answer = admin.post(reverse("tenant-edit", args=[tenant.pk]), data)
    assert answer.status_code == 422
    assert "default_class" in answer.context["form"].errors


def test_the_second_of_two_savers_sees_the_conflict(admin):
    tenant = factories.tenant(rpm=10)
    first = {"rpm": "20", "state": "active", "version": 1}
    second = {"rpm": "30", "state": "active", "version": 1}
    url = reverse("tenant-edit", args=[tenant.pk])
    assert admin.post(url, first).status_code == 302
    answer = admin.post(url, second)
    assert answer.status_code == 412
    assert b"was changed by someone else" in answer.content
    assert b"20" in answer.content
    tenant.refresh_from_db()
    assert tenant.rpm == 20
    assert admin.post(url, {**second, "version": 2}).status_code == 302


def test_names_are_checked(admin):
    for name in ("", "a b", "<script>", "x" * 65):
        assert admin.post(reverse("tenant-new"), {"name": name}).status_code == 422
    factories.tenant(name="taken")
    answer = admin.post(reverse("tenant-new"), {"name": "taken"})
    assert answer.status_code == 422
    assert "name" in answer.context["form"].errors


@pytest.mark.parametrize("role", ["viewer", "operator"])
def test_who_is_no_admin_changes_nothing_and_is_recorded(signed_in, role):
    client, made = signed_in(role), factories.api_key()
    posts = [
        reverse("tenant-new"),
        reverse("tenant-edit", args=[made.key.tenant_id]),
        reverse("key-new", args=[made.key.tenant_id]),
        reverse("key-rotate", args=[made.key.pk]),
        reverse("key-revoke", args=[made.key.pk]),
    ]
    for url in posts:
        assert client.post(url, {"grace": "0"}).status_code == 403
    assert Decision.objects.filter(kind="access_refused").count() == len(posts)
    made.key.refresh_from_db()
    assert made.key.revoked_at is None


def test_its_history_shows_what_happened_to_its_keys_too(admin):
    mine, other = factories.tenant(name="mine"), factories.tenant(name="other")
    for tenant in (mine, other):
        admin.post(reverse("key-new", args=[tenant.pk]), {"name": f"{tenant.name} key", "scopes": ["inference"]})
    key = ApiKey.objects.get(tenant=mine)
    api_key_rotate(actor=factories.ACTOR, key_id=key.pk, grace=timedelta(hours=1))
    api_key_revoke(actor=factories.ACTOR, key_id=key.pk)
    page = admin.get(reverse("tenant", args=[mine.pk])).content.decode()
    history = page[page.index('id="changes-title"') :]
    for what in ("created API key", "rotated API key", "revoked API key"):
        assert f"{what} {key.prefix}… (mine key)" in history
    assert "other key" not in history
