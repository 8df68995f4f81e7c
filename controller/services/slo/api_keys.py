"""API keys: the secret is shown once and stored only as its SHA-256."""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Sequence
from datetime import datetime, timedelta
from typing import NamedTuple

from django.core.exceptions import ValidationError
from django.db import transaction
from django.utils import timezone

from controller.models import ApiKey, Tenant
from controller.models.tenants import secret_digest
from controller.services import change
from controller.services.actors import Actor
from controller.services.config import config_version_raise

SECRET_BYTES = 32
PREFIX_LENGTH = 11  # "sk-" and eight characters: enough to tell keys apart, not enough to use one


class NewKey(NamedTuple):
    """A key and its secret, which is not stored: it can be shown only now."""

    key: ApiKey
    secret: str


def api_key_create(
    *,
    actor: Actor,
    tenant: Tenant,
    name: str,
    scopes: Sequence[str] = (ApiKey.Scope.INFERENCE, ApiKey.Scope.READ),
    expires_at: datetime | None = None,
    secret: str | None = None,
) -> NewKey:
    """`secret`: only for the documented demo key; None generates a random one."""
    secret = secret or f"sk-{secrets.token_urlsafe(SECRET_BYTES)}"
    key = ApiKey(
        tenant=tenant,
        name=name,
        prefix=secret[:PREFIX_LENGTH],
        sha256=secret_digest(secret),
        scopes=list(scopes),
        expires_at=expires_at,
    )
    return NewKey(change.create(key, actor=actor, kind="api_key", check=_check), secret)


def api_key_revoke(*, actor: Actor, key_id: int) -> ApiKey:
    """Gateways reject the key within a second. Revoking a revoked key changes nothing."""
    with transaction.atomic():
        key = ApiKey.objects.select_for_update().get(pk=key_id)
        if key.revoked_at is None:
            key.revoked_at = timezone.now()
            key.save(update_fields=["revoked_at"])
            change.audit(actor, "api_key", "revoked", key, {"tenant": key.tenant.name, "prefix": key.prefix})
            config_version_raise()
    return key


def api_key_rotate(*, actor: Actor, key_id: int, grace: timedelta = timedelta(0)) -> NewKey:
    """A new key with the same name, scopes and expiry. The old one stays valid for `grace`, but not beyond its own
    expiry; without `grace` it is revoked at once. Raises ValidationError for a revoked or expired key.
    """
    with transaction.atomic():
        old = ApiKey.objects.select_for_update().select_related("tenant").get(pk=key_id)
        now = timezone.now()
        if old.revoked_at is not None or (old.expires_at is not None and old.expires_at <= now):
            raise ValidationError("A revoked or expired key cannot be rotated. Create a new key.")
        made = api_key_create(
            actor=actor, tenant=old.tenant, name=old.name, scopes=old.scopes, expires_at=old.expires_at
        )
        told = {"tenant": old.tenant.name, "prefix": old.prefix, "successor": made.key.prefix}
        if grace <= timedelta(0):
            api_key_revoke(actor=actor, key_id=key_id)
        else:
            old.expires_at = min(now + grace, old.expires_at or now + grace)
            old.save(update_fields=["expires_at"])
            told["expires_at"] = old.expires_at.isoformat()
            config_version_raise()
        change.audit(actor, "api_key", "rotated", old, told)
    return made


def api_keys_used(*, key_ids: Iterable[int], at: datetime) -> int:
    """Store when keys were last used, in batches from gateways and without an audit record. Returns the number of rows
    updated."""
    return ApiKey.objects.filter(pk__in=list(key_ids)).exclude(last_used_at__gte=at).update(last_used_at=at)


def _check(key: ApiKey) -> None:
    unknown = sorted(set(key.scopes) - set(ApiKey.Scope.values))
    if unknown or not key.scopes:
        valid = ", ".join(ApiKey.Scope.values)
        raise ValidationError(
            {
                "scopes": f"Unknown: {', '.join(unknown)}. Must be one or more of: {valid}."
                if unknown
                else f"Must be one or more of: {valid}."
            }
        )
    if key.expires_at is not None and key.expires_at <= timezone.now():
        raise ValidationError({"expires_at": "Must be in the future."})
