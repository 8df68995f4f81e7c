"""Authentication: people by the console's session (with CSRF), tenants by API key (`Authorization: Bearer sk-...`),
service accounts by token (`Authorization: Bearer slk-...`).

A key is looked up by the SHA-256 of the whole secret, which is not stored. Unknown, revoked and expired keys, and keys
of a suspended tenant, all get the same error.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from django.utils import timezone
from rest_framework.authentication import BaseAuthentication, SessionAuthentication
from rest_framework.exceptions import AuthenticationFailed, PermissionDenied
from rest_framework.request import Request

from controller.models import ApiKey, ServiceToken
from controller.selectors.catalogue import key_of_secret
from controller.selectors.roles import ServicePrincipal
from controller.selectors.service_accounts import token_of_secret
from controller.services.access.service_accounts import MARK, service_token_used
from controller.services.slo.api_keys import api_keys_used

KEYWORD = "Bearer"
USE_NOTED_EVERY = timedelta(minutes=1)


@dataclass(frozen=True, slots=True)
class TenantPrincipal:
    """A tenant's API key as `request.user`. It has no role, and gives access to its tenant's data only."""

    key_id: int
    tenant_id: int
    tenant: str
    is_authenticated: bool = True
    is_active: bool = True
    is_superuser: bool = False

    @property
    def pk(self) -> str:
        return f"key-{self.key_id}"


class CsrfFailed(PermissionDenied):
    """A call with the session of `username` and without that session's CSRF token."""

    def __init__(self, detail: Any, username: str) -> None:
        super().__init__(detail)
        self.username = username


class ScopeMissing(PermissionDenied):
    """The key or token is valid but lacks a scope."""


class PeopleSessionAuthentication(SessionAuthentication):
    """Authenticates people by the console's session. Changes need the CSRF token."""

    def enforce_csrf(self, request: Request) -> None:
        try:
            super().enforce_csrf(request)
        except PermissionDenied as error:
            raise CsrfFailed(error.detail, request._request.user.get_username()) from None


class BearerKeyAuthentication(BaseAuthentication):
    """Authenticates tenants by API key, and service accounts by token. It comes first in `authentication_classes`, so
    that a call without credentials gets 401 instead of 403."""

    def authenticate(self, request: Request) -> tuple[TenantPrincipal | ServicePrincipal, Any] | None:
        word, _, secret = request.headers.get("Authorization", "").partition(" ")
        if word.lower() != KEYWORD.lower():
            return None
        return _service(secret.strip()) if secret.strip().startswith(MARK) else self._tenant(secret)

    def _tenant(self, secret: str) -> tuple[TenantPrincipal, ApiKey]:
        key = key_of_secret(secret.strip())
        if key is None:
            raise AuthenticationFailed("This API key is unknown, expired or revoked.")
        if ApiKey.Scope.READ not in key.scopes:
            raise ScopeMissing(f"This API key lacks the scope {ApiKey.Scope.READ.value!r}.")
        now = timezone.now()
        if key.last_used_at is None or now - key.last_used_at > USE_NOTED_EVERY:
            api_keys_used(key_ids=[key.pk], at=now)
        return TenantPrincipal(key.pk, key.tenant_id, key.tenant.name), key

    def authenticate_header(self, request: Request) -> str:
        return f'{KEYWORD} realm="slackline"'


def _service(secret: str) -> tuple[ServicePrincipal, ServiceToken]:
    token = token_of_secret(secret)
    if token is None:
        raise AuthenticationFailed("This token is unknown, expired or revoked.")
    now, account = timezone.now(), token.account
    if token.last_used_at is None or now - token.last_used_at > USE_NOTED_EVERY:
        service_token_used(token_id=token.pk, at=now)
    return ServicePrincipal(token.pk, account.pk, account.name, account.role, tuple(account.scopes)), token
