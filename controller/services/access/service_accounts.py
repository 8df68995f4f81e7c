"""Service accounts and their tokens: the secret is shown once and stored only as its SHA-256."""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta
from typing import Any, NamedTuple

from django.core.exceptions import ValidationError
from django.db import transaction
from django.utils import timezone

from controller.models import ServiceAccount, ServiceToken
from controller.models.tenants import secret_digest
from controller.services import change
from controller.services.actors import Actor

MARK = "slk-"  # what a token starts with, so that a leaked one is found by its form
SECRET_BYTES = 32
PREFIX_LENGTH = len(MARK) + 8
LONGEST = timedelta(days=366)
EDITABLE = ("title", "role", "scopes", "state")


class NewToken(NamedTuple):
    """A token and its secret, which is not stored: it can be shown only now."""

    token: ServiceToken
    secret: str


def service_account_create(
    *, actor: Actor, name: str, role: str, scopes: Sequence[str], title: str = ""
) -> ServiceAccount:
    row = ServiceAccount(name=name, title=title, role=role, scopes=list(scopes))
    return change.create(row, actor=actor, kind="service_account", check=_check, gateways=False)


def service_account_update(
    *, actor: Actor, account_id: int, version: int, changes: Mapping[str, Any]
) -> ServiceAccount:
    """The name never changes. `state` "suspended" disables all its tokens at once."""
    return change.update(
        ServiceAccount,
        account_id,
        actor=actor,
        kind="service_account",
        version=version,
        changes=changes,
        editable=EDITABLE,
        check=_check,
        gateways=False,
    )


def service_token_create(*, actor: Actor, account: ServiceAccount, expires_at: datetime) -> NewToken:
    """Raises ValidationError if `expires_at` is not in the future, or more than a year away."""
    secret = f"{MARK}{secrets.token_urlsafe(SECRET_BYTES)}"
    token = ServiceToken(
        account=account, prefix=secret[:PREFIX_LENGTH], sha256=secret_digest(secret), expires_at=expires_at
    )
    change.create(token, actor=actor, kind="service_token", check=_check_expiry, gateways=False)
    return NewToken(token, secret)


def service_token_revoke(*, actor: Actor, token_id: int) -> ServiceToken:
    """Every console refuses it from the next request on. Revoking a revoked token changes nothing."""
    with transaction.atomic():
        token = ServiceToken.objects.select_for_update().get(pk=token_id)
        if token.revoked_at is None:
            token.revoked_at = timezone.now()
            token.save(update_fields=["revoked_at"])
            inputs = {"account": token.account.name, "prefix": token.prefix}
            change.audit(actor, "service_token", "revoked", token, inputs)
    return token


def service_token_rotate(*, actor: Actor, token_id: int, expires_at: datetime, grace: timedelta) -> NewToken:
    """A new token of the same account. The old one stays valid for `grace`, but not beyond its own expiry.

    Raises ValidationError for a token that is not valid any more.
    """
    with transaction.atomic():
        old = ServiceToken.objects.select_for_update().select_related("account").get(pk=token_id)
        now = timezone.now()
        if old.revoked_at is not None or old.expires_at <= now:
            raise ValidationError("A revoked or expired token cannot be rotated. Create a new token.")
        made = service_token_create(actor=actor, account=old.account, expires_at=expires_at)
        if grace <= timedelta(0):
            service_token_revoke(actor=actor, token_id=token_id)
        else:
            old.expires_at = min(now + grace, old.expires_at)
            old.save(update_fields=["expires_at"])
            ends = {"account": old.account.name, "prefix": old.prefix, "expires_at": old.expires_at.isoformat()}
            change.audit(actor, "service_token", "rotated", old, {**ends, "successor": made.token.prefix})
    return made


def service_token_used(*, token_id: int, at: datetime) -> None:
    """Without an audit record."""
    ServiceToken.objects.filter(pk=token_id).exclude(last_used_at__gte=at).update(last_used_at=at)


def _check(account: ServiceAccount) -> None:
    unknown = sorted(set(account.scopes) - set(ServiceAccount.Scope.values))
    if unknown or not account.scopes:
        valid = ", ".join(ServiceAccount.Scope.values)
        said = f"Unknown: {', '.join(unknown)}. " if unknown else ""
        raise ValidationError({"scopes": f"{said}Must be one or more of: {valid}."})


def _check_expiry(token: ServiceToken) -> None:
    now = timezone.now()
    if token.expires_at <= now:
        raise ValidationError({"expires_at": "Must be in the future."})
    if token.expires_at > now + LONGEST:
        raise ValidationError({"expires_at": "Must be at most 366 days from now."})
