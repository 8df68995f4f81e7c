"""Service accounts: list, create, edit; creating, rotating and revoking their tokens.

Viewers can read, admins can change. A token's secret is shown once, in the response to the form that created it: it is
never in a URL, a session or a log.
"""

from __future__ import annotations

from typing import Any

from django.contrib import messages
from django.core.exceptions import ValidationError
from django.http import HttpRequest, HttpResponse
from django.shortcuts import get_object_or_404, redirect, render
from django.utils import timezone
from django.views.decorators.http import require_GET, require_http_methods, require_POST

from console.access import allows
from console.forms.service_accounts import ServiceAccountForm, TokenForm, TokenRotateForm
from console.forms.unsaved_forms import data_of
from console.views.configuration.classes import show_errors
from console.views.configuration.conflicts import Difference, differences
from controller.models import ServiceAccount, ServiceToken
from controller.selectors import service_accounts as accounts
from controller.selectors.records import decisions
from controller.selectors.roles import UserRole, role_of
from controller.services.access.service_accounts import (
    NewToken,
    service_account_create,
    service_account_update,
    service_token_create,
    service_token_revoke,
    service_token_rotate,
)
from controller.services.actors import Actor
from controller.services.change import VersionConflict
from controller.wording.sentences import sentence

CHANGES_SHOWN = 15


@require_GET
@allows(UserRole.VIEWER)
def account_list(request: HttpRequest) -> HttpResponse:
    context = {"accounts": accounts.service_accounts(), "may_change": _may_change(request)}
    return render(request, "console/service_accounts.html", context)


@require_GET
@allows(UserRole.VIEWER)
def account_detail(request: HttpRequest, account_id: int) -> HttpResponse:
    return render(request, "console/service_account.html", _context(request, _account(account_id), TokenForm()))


@require_http_methods(["GET", "POST"])
@allows(UserRole.ADMIN)
def account_new(request: HttpRequest) -> HttpResponse:
    form = ServiceAccountForm(data_of(request))
    if request.method == "POST" and form.is_valid():
        try:
            row = service_account_create(actor=_actor(request), **form.values())
        except ValidationError as error:
            show_errors(form, error)
        else:
            messages.success(request, f"Service account {row.name} created. Create a token to use it.")
            return redirect("service-account", row.pk)
    return render(request, "console/service_account_form.html", {"form": form}, status=422 if form.errors else 200)


@require_http_methods(["GET", "POST"])
@allows(UserRole.ADMIN)
def account_edit(request: HttpRequest, account_id: int) -> HttpResponse:
    row = _account(account_id)
    form = ServiceAccountForm(data_of(request), existing=row)
    conflict: list[Difference] = []
    if request.method == "POST" and form.is_valid():
        version = form.cleaned_data["version"]
        try:
            service_account_update(actor=_actor(request), account_id=row.pk, version=version, changes=form.values())
        except ValidationError as error:
            show_errors(form, error)
        except VersionConflict:
            row.refresh_from_db()
            conflict = differences(form, row, form.CHANGEABLE)
        else:
            messages.success(request, f"Service account {row.name} updated.")
            return redirect("service-account", row.pk)
    context = {"form": form, "row": row, "conflict": conflict}
    status = 409 if conflict else 422 if form.errors else 200
    return render(request, "console/service_account_form.html", context, status=status)


@require_POST
@allows(UserRole.ADMIN)
def token_new(request: HttpRequest, account_id: int) -> HttpResponse:
    account, form = _account(account_id), TokenForm(request.POST)
    if not form.is_valid():
        return render(request, "console/service_account.html", _context(request, account, form), status=422)
    expires_at = timezone.now() + form.lifetime()
    return _show_once(request, service_token_create(actor=_actor(request), account=account, expires_at=expires_at))


@require_POST
@allows(UserRole.ADMIN)
def token_rotate(request: HttpRequest, token_id: int) -> HttpResponse:
    old = get_object_or_404(accounts.service_tokens(), pk=token_id)
    form = TokenRotateForm(request.POST)
    if not form.is_valid():
        messages.error(request, "Not rotated: choose when the new token expires and when the old one is revoked.")
        return redirect("service-account", old.account_id)
    try:
        made = service_token_rotate(
            actor=_actor(request),
            token_id=old.pk,
            expires_at=timezone.now() + form.lifetime(),
            grace=form.grace_s(),
        )
    except ValidationError as error:
        messages.error(request, " ".join(error.messages))
        return redirect("service-account", old.account_id)
    old.refresh_from_db()
    return _show_once(request, made, old)


@require_POST
@allows(UserRole.ADMIN)
def token_revoke(request: HttpRequest, token_id: int) -> HttpResponse:
    token = get_object_or_404(accounts.service_tokens(), pk=token_id)
    service_token_revoke(actor=_actor(request), token_id=token.pk)
    messages.success(request, f"Token {token.prefix}… revoked. It is refused from now on.")
    return redirect("service-account", token.account_id)


def _show_once(request: HttpRequest, made: NewToken, old: ServiceToken | None = None) -> HttpResponse:
    context = {"account": made.token.account, "made": made, "old": old}
    return render(request, "console/token_made.html", context, status=201)


def _context(request: HttpRequest, account: ServiceAccount, form: TokenForm) -> dict[str, Any]:
    now = timezone.now()
    scopes = dict(ServiceAccount.Scope.choices)
    return {
        "row": account,
        "scopes": [scopes.get(each, each) for each in account.scopes],
        "tokens": [(token, _state(token, now)) for token in account.tokens.all()],
        "token_form": form,
        "rotate_form": TokenRotateForm(),
        "may_change": _may_change(request),
        "changes": [
            (decision, sentence(decision))
            for decision in decisions.search(subject_type="service_account", subject=account.name)[:CHANGES_SHOWN]
        ],
    }


def _account(account_id: int) -> ServiceAccount:
    return get_object_or_404(ServiceAccount, pk=account_id)


def _actor(request: HttpRequest) -> Actor:
    return Actor.person(request.user.get_username())


def _may_change(request: HttpRequest) -> bool:
    return role_of(request.user) >= UserRole.ADMIN


def _state(token: ServiceToken, now: Any) -> tuple[str, str]:
    """Colour and word."""
    if token.revoked_at is not None:
        return "idle", "revoked"
    return ("idle", "expired") if token.expires_at <= now else ("ok", "active")
