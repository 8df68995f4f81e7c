"""What API keys and tokens have in common: their state, their rotation, and the page that shows a secret once.

A secret is in the response to the form that created it and nowhere else: never in a URL, a session or a log.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime
from typing import Any, TypeVar

from django.contrib import messages
from django.core.exceptions import ValidationError
from django.http import HttpRequest, HttpResponse
from django.shortcuts import render

from console.forms.tenants import RotateForm
from controller.models import ApiKey, ServiceToken
from controller.services.access.service_accounts import NewToken
from controller.services.slo.api_keys import NewKey

M = TypeVar("M", NewKey, NewToken)
Secret = ApiKey | ServiceToken


def secret_state(row: Secret, now: datetime) -> tuple[str, str]:
    """Colour and word. A key lasts until it is revoked unless it was given an end; every token has one."""
    if row.revoked_at is not None:
        return "idle", "revoked"
    if row.expires_at is not None and row.expires_at <= now:
        return "idle", "expired"
    return ("warn", "expires") if isinstance(row, ApiKey) and row.expires_at is not None else ("ok", "active")


def rotated(request: HttpRequest, form: RotateForm, rotate: Callable[[], M]) -> M | None:
    """What `rotate` returns. None: it was not possible, and a message says why."""
    if not form.is_valid():
        messages.error(request, form.incomplete)
        return None
    try:
        return rotate()
    except ValidationError as error:
        messages.error(request, " ".join(error.messages))
        return None


def show_once(
    request: HttpRequest, template: str, made: NewKey | NewToken, old: Secret | None = None, **context: Any
) -> HttpResponse:
    """`old`: what `made` replaces."""
    if old is not None:
        old.refresh_from_db()
    return render(request, template, {"made": made, "old": old, **context}, status=201)
