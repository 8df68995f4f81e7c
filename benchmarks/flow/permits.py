"""How long a transfer waits for its first permit: a real transfer daemon, and one client that submits at a rate.

Each transfer ends as soon as it is told whether it may send, so the link is never the limit. Both processes take
processor time of the same machine.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import tempfile
import time

from controller.flow.flows import FlowStage
from workers.flowd.client import FlowClient

SIZE = 100_000
START_S = 20.0


async def _submit(path: str, rate: float, seconds: float) -> list[float]:
    """Seconds from each submit to its first permit. Raises RuntimeError if one is not scheduled."""
    client, loop = FlowClient(path), asyncio.get_running_loop()
    client.start()
    async with asyncio.timeout(START_S):
        while not client.connected:
            await asyncio.sleep(0.01)

    async def one() -> float:
        began = loop.time()
        flow = client.submit(FlowStage.KV_TRANSFER, SIZE, "other-host", 1.0)
        await flow.answered()
        if not flow.scheduled:
            raise RuntimeError(f"a transfer was not scheduled: {flow.reason}")
        flow.end()
        return loop.time() - began

    began, tasks = loop.time(), list[asyncio.Task[float]]()
    while (passed := loop.time() - began) < seconds:
        tasks += [asyncio.ensure_future(one()) for _ in range(round(passed * rate) - len(tasks))]
        await asyncio.sleep(0.0005)
    try:
        return await asyncio.gather(*tasks)
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
            return sorted(asyncio.run(_submit(path, rate, seconds)))
        finally:
            daemon.terminate()
            daemon.wait(10.0)
