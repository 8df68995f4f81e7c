"""Who is calling: people by the console's session (with CSRF), tenants by API key (`Authorization: Bearer sk-...`).

A key is looked up by the SHA-256 of the whole secret; the secret itself is stored nowhere. Unknown, revoked and expired
keys, and keys of a suspended tenant, get one and the same answer.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from rest_framework.authentication import BaseAuthentication, SessionAuthentication
from rest_framework.exceptions import AuthenticationFailed
from rest_framework.request import Request

KEYWORD = "Bearer"
SECRET_LENGTH_MAX = 200


@dataclass(frozen=True, slots=True)
class TenantPrincipal:
    """A tenant's API key as `request.user`: no person, no role, only its tenant's data."""

    key_id: int
    tenant_id: int
    tenant: str
    scopes: tuple[str, ...]
    is_authenticated: bool = True
    is_active: bool = True
    is_superuser: bool = False

    @property
    def pk(self) -> str:
        return f"key-{self.key_id}"


class PeopleSessionAuthentication(SessionAuthentication):
    """The console's login; changes need the CSRF token."""


class BearerKeyAuthentication(BaseAuthentication):
    """A tenant's API key. First in line, so that a missing login answers 401 and not 403."""

    def authenticate(self, request: Request) -> tuple[TenantPrincipal, Any] | None:
        word, _, secret = request.headers.get("Authorization", "").partition(" ")
        if word.lower() != KEYWORD.lower():
            return None
        key = key_of_secret(secret.strip())
        if key is None:
            raise AuthenticationFailed("This API key is unknown, expired or revoked.")
        principal = TenantPrincipal(key.pk, key.tenant_id, key.tenant.name, tuple(key.scopes))
        return principal, key

    def authenticate_header(self, request: Request) -> str:
        return f'{KEYWORD} realm="slackline"'
