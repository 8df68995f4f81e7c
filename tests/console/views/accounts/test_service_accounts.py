"""Pages of service accounts: who sees and changes them, the token that is shown once, two admins at once."""

from __future__ import annotations

import re

import pytest
from django.urls import reverse

from console.forms.service_accounts import TokenRotateForm
from controller.models import Decision, ServiceAccount, ServiceToken

pytestmark = pytest.mark.django_db
FIELDS = {"name": "deployer", "title": "", "role": "operator", "scopes": ["read", "fleet"]}


@pytest.fixture
def account(admin):
    answer = admin.post(reverse("service-account-new"), FIELDS)
    assert answer.status_code == 302
    return ServiceAccount.objects.get(name="deployer")


def made(admin, account, days="90"):
    answer = admin.post(reverse("service-token-new", args=[account.pk]), {"days": days})
    assert answer.status_code == 201
    return re.search(r"slk-[\w-]{43}", answer.content.decode())[0]


def test_an_admin_makes_an_account_and_a_token_that_is_shown_once(admin, account):
    secret = made(admin, account)
    token = ServiceToken.objects.get()
    assert secret.startswith(token.prefix)
    assert 89 <= (token.expires_at - token.created_at).days <= 90
    page = admin.get(reverse("service-account", args=[account.pk])).content.decode()
    assert token.prefix in page
    assert secret not in page
    assert "Instances, launch templates, models, hosts, devices and links" in page
    assert b"deployer" in admin.get(reverse("service-accounts")).content


def test_a_viewer_reads_and_changes_nothing(admin, viewer, account):
    made(admin, account)
    token = ServiceToken.objects.get()
    page = viewer.get(reverse("service-account", args=[account.pk]))
    assert page.status_code == 200
    assert b"Create token" not in page.content
    assert b"New service account" not in viewer.get(reverse("service-accounts")).content
    for name, pk in (
        ("service-account-edit", account.pk), ("service-token-new", account.pk), ("service-token-rotate", token.pk),
        ("service-token-revoke", token.pk),
    ):  # fmt: skip
        assert viewer.post(reverse(name, args=[pk]), {"days": "90", "grace": "0"}).status_code == 403
    assert viewer.post(reverse("service-account-new"), FIELDS).status_code == 403
    assert ServiceToken.objects.get().revoked_at is None


def test_the_row_of_a_token_offers_what_the_rotation_takes(admin, account):
    made(admin, account)
    page = admin.get(reverse("service-account", args=[account.pk])).content.decode()
    offered = re.findall(r'<option value="(\d+)"( selected)?>Revoke old token ([^<]+)</option>', page)
    form = TokenRotateForm()
    assert [(value, label) for value, _, label in offered] == form.fields["grace"].choices
    assert [value for value, selected, _ in offered if selected] == [form.fields["grace"].initial]
    assert '<input type="hidden" name="days" value="90">' in page


def test_a_token_is_rotated_and_revoked(admin, account):
    first = made(admin, account)
    old = ServiceToken.objects.get()
    answer = admin.post(reverse("service-token-rotate", args=[old.pk]), {"days": "30", "grace": "3600"})
    assert answer.status_code == 201
    assert b"works until" in answer.content
    assert first not in answer.content.decode()
    answer = admin.post(reverse("service-token-revoke", args=[old.pk]), follow=True)
    assert b"revoked. It is refused from now on." in answer.content
    answer = admin.post(reverse("service-token-rotate", args=[old.pk]), {"days": "30", "grace": "0"}, follow=True)
    assert b"A revoked or expired token cannot be rotated" in answer.content


def test_an_account_without_scopes_or_with_a_taken_name_is_refused(admin, account):
    answer = admin.post(reverse("service-account-new"), {**FIELDS, "name": "other", "scopes": []})
    assert answer.status_code == 422
    answer = admin.post(reverse("service-account-new"), FIELDS)
    assert answer.status_code == 422
    assert b"already exists" in answer.content


def test_two_admins_save_at_once_and_the_second_sees_the_difference(admin, account):
    path = reverse("service-account-edit", args=[account.pk])
    edit = {"title": "", "role": "viewer", "scopes": ["read"], "state": "active", "version": "1"}
    assert admin.post(path, edit).status_code == 302
    answer = admin.post(path, {**edit, "role": "admin"})
    assert b"was changed by someone else" in answer.content
    assert ServiceAccount.objects.get().role == "viewer"
    assert admin.post(path, {**edit, "role": "admin", "version": "2"}).status_code == 302
    assert ServiceAccount.objects.get().role == "admin"
    assert Decision.objects.filter(kind="service_account_updated").count() == 2
