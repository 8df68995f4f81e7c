"""How long a transfer waits for its first permit: a real transfer daemon, and one client that submits at a rate.

Each transfer ends as soon as it is told whether it may send, so the link is never the limit. Both processes take
processor time of the same machine. The client runs on the event loop of engines.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import tempfile
import time

import uvloop

from controller.flow.flows import FlowStage
from workers.flowd.client import FlowClient

SIZE = 100_000
START_S = 20.0


async def _submit(path: str, rate: float, seconds: float) -> list[float]:
    """Seconds from each submit to its first permit. Raises RuntimeError if one is not scheduled."""
    client = FlowClient(path)
    client.start()
    async with asyncio.timeout(START_S):
        while not client.connected:
            await asyncio.sleep(0.01)
    took: list[float] = []

    async def one() -> None:
        began = time.perf_counter()
        flow = client.submit(FlowStage.KV_TRANSFER, SIZE, "other-host", 1.0)
        await flow.answered()
        took.append(time.perf_counter() - began)
        if not flow.scheduled:
            raise RuntimeError(f"a transfer was not scheduled: {flow.reason}")
        flow.end()

    began, submitted = time.perf_counter(), 0
    try:
        # Tasks that have ended are let go: with all of them kept, the garbage collector would hold up the rest.
        async with asyncio.TaskGroup() as group:
            while (passed := time.perf_counter() - began) < seconds:
                for _ in range(round(passed * rate) - submitted):
                    group.create_task(one())
                    submitted += 1
                await asyncio.sleep(0.001)  # the least that uvloop waits
        return took
    finally:
        client.close()


def permit_seconds(rate: float, seconds: float, policy: str = "mfs") -> list[float]:
    """Sorted."""
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:  # the path of a Unix socket must be short
        path = f"{folder}/flowd.sock"
        env = {**os.environ, "FLOW_POLICY": policy, "FLOW_SOCKET": path}
        daemon = subprocess.Popen([sys.executable, "-m", "workers.flowd"], env=env)
        try:
            deadline = time.monotonic() + START_S
            while not os.path.exists(path) and time.monotonic() < deadline:
                time.sleep(0.02)
            return sorted(uvloop.run(_submit(path, rate, seconds)))
        finally:
            daemon.terminate()
            daemon.wait(10.0)
