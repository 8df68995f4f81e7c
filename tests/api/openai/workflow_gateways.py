"""Gateways of one Redis, whose tenants have workflows: acme, and another one."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from typing import Any

from django.conf import settings

from controller.core.snapshot import Entitlements, GatewaySnapshot
from tests.api.openai.gateways import TestBed, completion, key_config, snapshot
from workers.live import LiveState

OTHER = "sk-other-key"


def config(**entitled: Any) -> GatewaySnapshot:
    found = snapshot()
    (acme,) = found.tenants
    tenants = (replace(acme, entitled=Entitlements(**entitled)), replace(acme, id=2, name="other"))
    return replace(found, tenants=tenants, keys=(*found.keys, key_config(OTHER, id=2, tenant="other")))


@asynccontextmanager
async def gateway(name: str = "gw-a", url: str | None = None, **entitled: Any) -> AsyncIterator[TestBed]:
    async with TestBed(config(**entitled)) as bed:
        board = LiveState(url or settings.REDIS_URL, name)
        bed.gateway.workflows.board = bed.gateway.steps.board = bed.gateway.forks.board = board
        watching = asyncio.create_task(bed.gateway.workflows.watch(bed.gateway.end_workflow))
        try:
            yield bed
        finally:
            while not watching.done():  # a client of Redis may swallow one cancellation
                watching.cancel()
                with suppress(asyncio.CancelledError):
                    await asyncio.wait([watching], timeout=0.5)
            await board.close()


def call(workflow: str = "w1", **fields: Any) -> dict[str, Any]:
    return completion(metadata={"workflow_id": workflow}, **fields)
