"""API key to tenant, from memory. Keys are kept and looked up as SHA-256 only."""

from __future__ import annotations

from hashlib import sha256

from api.openai.protocol.errors import ApiError
from controller.core.snapshot import GatewaySnapshot, KeyConfig, TenantConfig

SCOPE = "inference"


class KeyRing:
    """The keys of one configuration. Expiry is judged at each use; a revoked key is simply not in the snapshot."""

    def __init__(self, snapshot: GatewaySnapshot) -> None:
        self._keys: dict[str, KeyConfig] = {key.sha256: key for key in snapshot.keys}
        self._tenants: dict[str, TenantConfig] = {tenant.name: tenant for tenant in snapshot.tenants}

    def tenant(self, authorization: bytes | None, wall: float) -> tuple[TenantConfig, KeyConfig]:
        """Raises ApiError. `wall` is epoch seconds."""
        if authorization is None or authorization[:7].lower() != b"bearer ":
            raise ApiError("invalid_api_key", "Send an API key: `Authorization: Bearer sk-...`.")
        key = self._keys.get(sha256(authorization[7:].strip()).hexdigest())
        if key is None:
            raise ApiError("invalid_api_key", "The API key is unknown or revoked.")
        if key.expires_at is not None and key.expires_at <= wall:
            raise ApiError("invalid_api_key", "The API key has expired.")
        tenant = self._tenants.get(key.tenant)
        if tenant is None or not tenant.active:
            raise ApiError("invalid_api_key", "The tenant of this API key is not active.")
        if SCOPE not in key.scopes:
            raise ApiError("permission_denied", f"This API key lacks the scope {SCOPE!r}.")
        return tenant, key
