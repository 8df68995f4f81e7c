"""Keys lead to tenants, and quotas let their requests in."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest

from api.openai.protocol.errors import ApiError
from api.openai.tenants import KeyRing, Quotas
from controller.core.snapshot import KeyConfig, TenantConfig
from tests.api.openai.gateways import KEY, TestBed, completion, key_config, settled, snapshot
from tests.waiting import until_on_loop
from workers.backends.fake import Script

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


INACTIVE = (TenantConfig(1, "acme", None, active=False),)
GONE = {
    "revoked": (key_config(), {"keys": ()}, "invalid_api_key"),
    "tenant deactivated": (
        key_config(),
        {"tenants": (TenantConfig(1, "acme", None, active=False),)},
        "invalid_api_key",
    ),
    "expired": (key_config(expires_at=time.time() + 3600), {"keys": ()}, ""),
    "kept": (key_config(), {"version": 2}, ""),
}


@pytest.mark.parametrize(("key", "change", "code"), GONE.values(), ids=GONE.keys())
@pytest.mark.parametrize("stream", [True, False], ids=["streamed", "whole"])
async def test_what_a_revoked_key_asked_for_ends_and_what_an_expired_one_did_goes_on(
    key: KeyConfig, change: dict[str, Any], code: str, stream: bool
) -> None:
    async with TestBed(snapshot(("e1",), keys=(key,))) as bed:
        backend = bed.backend("e1", Script(hang_after=2))
        client = bed.send(completion(stream=stream))
        await until_on_loop(lambda: backend.running == 1 and (client.answer.body or not stream))
        if key.expires_at is not None:
            now = time.monotonic()
            bed.gateway.shared.heard(key.expires_at + 1, now, now)
            bed.gateway.tell_clock()
        bed.gateway.configure(snapshot(("e1",), **change))
        if not code:
            await settled()
            assert (backend.aborted, len(bed.gateway.runtime.requests)) == ([], 1)
            await client.hang_up()
            return
        answer = await client.done()
        error = json.loads(answer.events[-1])["error"] if stream else answer.error
        assert (answer.status, error["code"]) == (200 if stream else 401, code)
        (record,) = bed.sink.records
        assert (record.outcome, record.error_code) == ("cut" if stream else "refused", code)
        assert backend.aborted == [record.id]


def refused(quotas: Quotas, tenant: TenantConfig, tokens: int, now: float) -> ApiError:
    with pytest.raises(ApiError) as caught:
        quotas.admit(tenant, tokens, now)
    assert (caught.value.status, caught.value.code) == (429, "rate_limit_exceeded")
    return caught.value


def test_requests_a_minute_refill_evenly() -> None:
    quotas, tenant = Quotas(), TenantConfig(1, "a", None, rpm=60)
    for _ in range(60):
        quotas.admit(tenant, 1, 0.0)
    assert refused(quotas, tenant, 1, 0.0).retry_after_s == pytest.approx(1.0)
    quotas.admit(tenant, 1, 1.01)
    refused(quotas, tenant, 1, 1.02)


def test_tokens_a_minute_are_corrected_by_what_was_used() -> None:
    quotas, tenant = Quotas(), TenantConfig(1, "a", None, tpm=1000)
    quotas.admit(tenant, 900, 0.0)
    assert refused(quotas, tenant, 200, 0.0).retry_after_s == pytest.approx(6.0)
    quotas.release("a", expected=900, actual=100)
    quotas.admit(tenant, 200, 0.0)


def test_a_request_larger_than_a_minute_never_fits() -> None:
    quotas, tenant = Quotas(), TenantConfig(1, "a", None, tpm=100)
    assert "this one request" in refused(quotas, tenant, 101, 0.0).message


def test_concurrency_counts_open_requests() -> None:
    quotas, tenant = Quotas(), TenantConfig(1, "a", None, max_concurrency=2)
    quotas.admit(tenant, 1, 0.0)
    quotas.admit(tenant, 1, 0.0)
    refused(quotas, tenant, 1, 0.0)
    quotas.release("a", 1, 1)
    quotas.admit(tenant, 1, 0.0)
    assert quotas.active("a") == 2


def test_a_refused_request_costs_nothing() -> None:
    quotas, tenant = Quotas(), TenantConfig(1, "a", None, rpm=2, tpm=100)
    refused(quotas, tenant, 500, 0.0)
    quotas.admit(tenant, 50, 0.0)
    quotas.admit(tenant, 50, 0.0)
    assert quotas.active("a") == 2


def test_a_changed_limit_keeps_what_was_used() -> None:
    quotas = Quotas()
    for _ in range(5):
        quotas.admit(TenantConfig(1, "a", None, rpm=10), 1, 0.0)
    smaller = TenantConfig(1, "a", None, rpm=6)
    quotas.admit(smaller, 1, 0.0)
    assert refused(quotas, smaller, 1, 0.0).retry_after_s == pytest.approx(10.0)


def test_a_limit_of_zero_lets_nothing_in() -> None:
    assert refused(Quotas(), TenantConfig(1, "a", None, rpm=0), 1, 0.0).retry_after_s == 60.0
