"""A body may take half a minute to come: who may send it, and what, is judged when it is whole.

Found by attack: a request whose head had come before its key was revoked was answered, to the end of its stream.
"""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from controller.core.snapshot import Entitlements, GatewaySnapshot, TenantConfig
from tests.api.openai.gateways import KEY, Client, TestBed, completion, key_config, settled, snapshot
from workers.backends.fake import Script

BODY = json.dumps(completion(stream=True)).encode()
LATER = 20  # bytes of the body that come before the change


class SlowClient(Client):
    """Sends the rest of its body only after `go_on` is set."""

    def __init__(self, bed: TestBed, path: str, body: bytes = BODY) -> None:
        self.go_on = asyncio.Event()
        self._rest = body[LATER:]
        super().__init__(bed.app, path, body[:LATER], [(b"authorization", b"Bearer " + KEY.encode())], "POST")

    async def _receive(self) -> dict[str, Any]:
        if self._parts:
            return {"type": "http.request", "body": self._parts.pop(), "more_body": True}
        if self._rest:
            await self.go_on.wait()
            rest, self._rest = self._rest, b""
            return {"type": "http.request", "body": rest, "more_body": False}
        return await super()._receive()


def tenant(**changes: Any) -> GatewaySnapshot:
    return snapshot(tenants=(replace(TenantConfig(1, "acme", "chat"), **changes),))


CHANGES: dict[str, tuple[Callable[[], GatewaySnapshot], int, str]] = {
    "its key is revoked": (lambda: snapshot(keys=()), 401, "invalid_api_key"),
    "its key expires": (lambda: snapshot(keys=(key_config(expires_at=1.0),)), 401, "invalid_api_key"),
    "its key loses the scope": (lambda: snapshot(keys=(key_config(scopes=("read",)),)), 403, "permission_denied"),
    "its tenant is suspended": (lambda: tenant(active=False), 401, "invalid_api_key"),
    "it loses the model": (lambda: tenant(entitled=Entitlements(allowed_models=("x",))), 403, "permission_denied"),
    "its quota is cut": (lambda: tenant(max_concurrency=0), 429, "rate_limit_exceeded"),
}  # fmt: skip


@pytest.mark.parametrize("what", CHANGES)
async def test_a_body_that_ends_after_a_change_is_judged_by_it(what: str) -> None:
    changed, status, code = CHANGES[what]
    async with TestBed() as bed:
        bed.every(Script())
        client = SlowClient(bed, "/v1/completions")
        await settled()
        bed.gateway.configure(changed())
        client.go_on.set()
        answer = await client.done()
        assert (answer.status, answer.error["code"]) == (status, code)
        assert bed.gateway.quotas.body_bytes == 0
        assert all(not bed.backend(name).calls for name in bed.gateway.fleet.backends)


async def test_one_that_ends_after_the_configuration_became_too_old_is_refused() -> None:
    async with TestBed() as bed:
        client = SlowClient(bed, "/v1/completions")
        await settled()
        bed.gateway.options = replace(bed.gateway.options, config_max_age_s=60.0)
        bed.gateway.config_age_s = lambda: math.inf
        client.go_on.set()
        answer = await client.done()
        assert (answer.status, answer.error["code"]) == (503, "configuration_stale")


async def test_one_that_nothing_changed_for_is_answered() -> None:
    async with TestBed() as bed:
        bed.every(Script())
        client = SlowClient(bed, "/v1/completions")
        await settled()
        bed.gateway.configure(snapshot(version=2))
        client.go_on.set()
        answer = await client.done()
        assert (answer.status, answer.events[-1]) == (200, "[DONE]")
