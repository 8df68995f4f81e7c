from __future__ import annotations

import pytest

from api.openai.auth import KeyRing
from api.openai.protocol.errors import ApiError
from controller.core.snapshot import TenantConfig
from tests.api.openai.gateways import KEY, key_config, snapshot

BEARER = f"Bearer {KEY}".encode()


def code_of(ring: KeyRing, authorization: bytes | None, wall: float = 100.0) -> str:
    with pytest.raises(ApiError) as caught:
        ring.tenant(authorization, wall)
    return caught.value.code


def test_a_key_leads_to_its_tenant() -> None:
    tenant, key = KeyRing(snapshot()).tenant(BEARER, 0.0)
    assert (tenant.name, key.id) == ("acme", 1)
    assert KeyRing(snapshot()).tenant(b"bearer  " + KEY.encode() + b" ", 0.0)[0].name == "acme"


@pytest.mark.parametrize(
    "header", [None, b"", b"Basic abc", b"Bearer ", b"Bearer sk-wrong", BEARER + b"x", b"Bearer \xff"]
)
def test_anything_else_is_refused(header: bytes | None) -> None:
    assert code_of(KeyRing(snapshot()), header) == "invalid_api_key"


def test_a_key_ends_at_its_expiry() -> None:
    ring = KeyRing(snapshot(keys=(key_config(expires_at=100.0),)))
    assert ring.tenant(BEARER, 99.9)[0].name == "acme"
    assert code_of(ring, BEARER, 100.0) == "invalid_api_key"


def test_a_revoked_key_is_no_longer_there() -> None:
    assert code_of(KeyRing(snapshot(keys=())), BEARER) == "invalid_api_key"


def test_an_inactive_tenant_is_refused() -> None:
    ring = KeyRing(snapshot(tenants=(TenantConfig(1, "acme", None, active=False),)))
    assert code_of(ring, BEARER) == "invalid_api_key"


def test_a_key_without_the_scope_is_forbidden() -> None:
    ring = KeyRing(snapshot(keys=(key_config(scopes=("control",)),)))
    assert code_of(ring, BEARER) == "permission_denied"
