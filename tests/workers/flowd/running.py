"""A transfer daemon in the test's own loop, clients of it, and a transfer that fills the link."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from controller.flow.gate import GateConfig
from tests.waiting import until_on_loop
from workers.flowd.client import Flow, FlowClient
from workers.flowd.daemon import FlowDaemon
from workers.flowd.settings import FlowdSettings

MB = 1 << 20
WAIT_S = 20.0


@asynccontextmanager
async def serving(path: str, policy: str = "mfs", **config: Any) -> AsyncIterator[FlowDaemon]:
    """On a busy machine senders are slow, so by default none counts as unable to fill the link (`settle_s`)."""
    daemon = FlowDaemon(FlowdSettings(policy, 100 * MB, path), GateConfig(**{"settle_s": 60.0, **config}))
    await daemon.start()
    try:
        yield daemon
    finally:
        await daemon.close()


@asynccontextmanager
async def connected(path: str) -> AsyncIterator[FlowClient]:
    client = FlowClient(path)
    client.start()
    try:
        await until_on_loop(lambda: client.connected)
        yield client
    finally:
        client.close()


async def nothing() -> None:
    """For `still`."""


async def turns() -> None:
    for _ in range(50):
        await asyncio.sleep(0)


@asynccontextmanager
async def sending(client: FlowClient, due_in_s: float = 1.0, size: int = 10_000 * MB) -> AsyncIterator[Flow]:
    """A transfer that fills the link, as long as none goes before it."""
    flow = client.submit(3, size, "host", due_in_s)
    await flow.turn(nothing)

    async def send() -> None:
        while True:
            await flow.turn(nothing)
            flow.sent(size // 5000)
            await asyncio.sleep(0.01)

    task = asyncio.ensure_future(send())
    try:
        yield flow
    finally:
        task.cancel()
        flow.end()
