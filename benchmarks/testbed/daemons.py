"""The transfer daemons of a testbed, one on each host that sends, and the clients that ask them."""

from __future__ import annotations

import asyncio
import contextlib
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from pathlib import Path

from benchmarks.servers.engines import ROOT, prefer
from benchmarks.testbed.hosts import EmulatedHost
from workers.flowd.client import FlowClient

START_S = 40.0
STOP_S = 10.0


@contextlib.contextmanager
def daemons(hosts: Sequence[EmulatedHost], policy: str, mbit: float) -> Iterator[dict[str, str]]:
    """Paths of their sockets by host. Raises RuntimeError if one does not start."""
    env = {**os.environ, "FLOW_POLICY": policy, "FLOW_LINK_GBPS": str(mbit / 1e3), "REDIS_URL": ""}
    with tempfile.TemporaryDirectory(prefix="tb-", dir="/tmp") as folder, contextlib.ExitStack() as stopping:
        paths = {}
        for host in hosts:
            paths[host.name] = path = f"{folder}/{host.name}.sock"  # a Unix socket is no part of the network
            process = subprocess.Popen(
                [*host.command, sys.executable, "-m", "workers.flowd"], env={**env, "FLOW_SOCKET": path}, cwd=ROOT,
                stderr=subprocess.DEVNULL, start_new_session=True,
            )  # fmt: skip
            stopping.callback(_stop, process)
            prefer(process.pid)
        deadline = time.monotonic() + START_S
        while not all(Path(path).exists() for path in paths.values()):
            if time.monotonic() > deadline:
                raise RuntimeError(f"not all transfer daemons started within {START_S:.0f} s")
            time.sleep(0.05)
        yield paths


def _stop(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(STOP_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


@contextlib.asynccontextmanager
async def clients(paths: Mapping[str, str], units: Sequence[str]) -> AsyncIterator[dict[tuple[str, str], FlowClient]]:
    """Connected ones, by host and unit. Raises TimeoutError."""
    made = {(host, unit): FlowClient(path, unit) for host, path in paths.items() for unit in units}
    for client in made.values():
        client.start()
    try:
        async with asyncio.timeout(START_S):
            while not all(client.connected for client in made.values()):
                await asyncio.sleep(0.02)
        yield made
    finally:
        for client in made.values():
            client.close()
