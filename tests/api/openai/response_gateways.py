"""Gateways that keep responses, for tests: what is asked of them and read there."""

from __future__ import annotations

import asyncio
import json
from contextlib import asynccontextmanager, suppress

from tests.api.openai import workflow_gateways
from tests.api.openai.test_steps import keeps

PATH = "/v1/responses"


@asynccontextmanager
async def gateway(name="gw-a", url=None, retention_s=60, watched=True, **others):
    async with workflow_gateways.gateway(name, url) as bed:
        keeps(bed, retention_s, **others)
        watching = asyncio.create_task(bed.gateway.responses.watch()) if watched else None
        try:
            yield bed
        finally:
            while watching is not None and not watching.done():
                watching.cancel()
                with suppress(asyncio.CancelledError):
                    await asyncio.wait([watching], timeout=0.5)


def asked(said="hello", **fields):
    return {"model": "demo", "input": said, **fields}


async def ask(bed, body, **others):
    answer = await bed.ask(body, PATH, **others)
    assert answer.status == 200, answer.body
    return json.loads(answer.body)


async def call(bed, response, below="", method="GET", **others):
    return await bed.ask(b"", f"{PATH}/{response}{below}", method=method, **others)


async def shown(bed, response, below="", method="GET", **others):
    answer = await call(bed, response, below, method, **others)
    assert answer.status == 200, answer.body
    return json.loads(answer.body)


def messages(bed, number=-1):
    sent = [call for name in bed.gateway.fleet.backends for call in bed.backend(name).calls]
    return json.loads(sent[number].head + b"}")["messages"]


async def ended(bed, response):
    found = {}
    for _ in range(1500):
        found = await shown(bed, response)
        if found["status"] != "in_progress":
            return found
        await asyncio.sleep(0.02)
    return found
