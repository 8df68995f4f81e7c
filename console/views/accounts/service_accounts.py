"""Service accounts: list, create, edit; creating, rotating and revoking their tokens.

Viewers can read, admins can change.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from django.contrib import messages
from django.http import HttpRequest, HttpResponse
from django.shortcuts import get_object_or_404, redirect, render
from django.utils import timezone
from django.views.decorators.http import require_GET, require_http_methods, require_POST

from console.access import actor_of, allows
from console.forms.service_accounts import ServiceAccountForm, TokenForm, TokenRotateForm
from console.forms.unsaved_forms import data_of
from console.views.accounts.secrets import rotated, secret_state, show_once
from console.views.editing import Difference, created, form_page, say_updated, updated
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
from controller.wording.sentences import sentence

CHANGES_SHOWN = 15


@require_GET
@allows(UserRole.VIEWER)
def account_list(request: HttpRequest) -> HttpResponse:
    context = {"accounts": accounts.service_accounts(), "may_change": _may_change(request)}
    return render(request, "console/accounts/service_accounts.html", context)


@require_GET
@allows(UserRole.VIEWER)
def account_detail(request: HttpRequest, account_id: int) -> HttpResponse:
    return render(
        request, "console/accounts/service_account.html", _context(request, _account(account_id), TokenForm())
    )


@require_http_methods(["GET", "POST"])
@allows(UserRole.ADMIN)
def account_new(request: HttpRequest) -> HttpResponse:
    form = ServiceAccountForm(data_of(request))
    row = created(
        request, form, service_account_create, "Service account {0.name} created. Create a token to use it.".format
    )
    if row is not None:
        return redirect("service-account", row.pk)
    return form_page(request, "console/accounts/service_account_form.html", form)


@require_http_methods(["GET", "POST"])
@allows(UserRole.ADMIN)
def account_edit(request: HttpRequest, account_id: int) -> HttpResponse:
    row = _account(account_id)
    form = ServiceAccountForm(data_of(request), existing=row)
    conflict: list[Difference] = []
    if request.method == "POST" and form.is_valid():
        write = partial(service_account_update, actor=actor_of(request), account_id=row.pk)
        stored, conflict = updated(form, row, write)
        if stored is not None:
            say_updated(request, form, stored, f"Service account {row.name} updated.")
            return redirect("service-account", row.pk)
    return form_page(request, "console/accounts/service_account_form.html", form, conflict, row=row)


@require_POST
@allows(UserRole.ADMIN)
def token_new(request: HttpRequest, account_id: int) -> HttpResponse:
    account, form = _account(account_id), TokenForm(request.POST)
    if not form.is_valid():
        return render(request, "console/accounts/service_account.html", _context(request, account, form), status=422)
    expires_at = timezone.now() + form.lifetime()
    return _show_token(request, service_token_create(actor=actor_of(request), account=account, expires_at=expires_at))


@require_POST
@allows(UserRole.ADMIN)
def token_rotate(request: HttpRequest, token_id: int) -> HttpResponse:
    old = get_object_or_404(accounts.service_tokens(), pk=token_id)
    form = TokenRotateForm(request.POST)
    made = rotated(
        request,
        form,
        lambda: service_token_rotate(
            actor=actor_of(request),
            token_id=old.pk,
            expires_at=timezone.now() + form.lifetime(),
            grace=form.grace_s(),
        ),
    )
    return redirect("service-account", old.account_id) if made is None else _show_token(request, made, old)


@require_POST
@allows(UserRole.ADMIN)
def token_revoke(request: HttpRequest, token_id: int) -> HttpResponse:
    token = get_object_or_404(accounts.service_tokens(), pk=token_id)
    service_token_revoke(actor=actor_of(request), token_id=token.pk)
    messages.success(request, f"Token {token.prefix}… revoked. It is refused from now on.")
    return redirect("service-account", token.account_id)


def _show_token(request: HttpRequest, made: NewToken, old: ServiceToken | None = None) -> HttpResponse:
    return show_once(request, "console/accounts/token_made.html", made, old, account=made.token.account)


def _context(request: HttpRequest, account: ServiceAccount, form: TokenForm) -> dict[str, Any]:
    now = timezone.now()
    scopes = dict(ServiceAccount.Scope.choices)
    return {
        "row": account,
        "scopes": [scopes.get(each, each) for each in account.scopes],
        "tokens": [(token, secret_state(token, now)) for token in account.tokens.all()],
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


def _may_change(request: HttpRequest) -> bool:
    return role_of(request.user) >= UserRole.ADMIN
