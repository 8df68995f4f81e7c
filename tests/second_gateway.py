"""Another gateway beside that of a running `make up`: the same settings, database, Redis and instances."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import requests

from tests.waiting import until
from workers.supervisor.plan import ROOT
from workers.supervisor.ports import free_port

READY_S, STOP_S = 60.0, 40.0


@contextmanager
def second_gateway(first: int, log: Path) -> Iterator[str]:
    """Its address. `first`: the process id of the gateway that it takes its environment from."""
    port = free_port()
    url, told = f"http://127.0.0.1:{port}", {**psutil.Process(first).environ(), "GATEWAY_PORT": str(port)}
    command = [sys.executable, "-m", "api.openai", "--port", str(port), "--name", "second"]
    with log.open("a") as output:
        process = subprocess.Popen(command, env=told, cwd=ROOT, stdout=output, stderr=output)

    def ready() -> bool:
        assert process.poll() is None, log.read_text()[-3000:]
        try:
            return requests.get(f"{url}/healthz", timeout=2).ok
        except requests.RequestException:
            return False

    try:
        until(ready, READY_S, every_s=0.1)
        yield url
    finally:
        process.terminate()
        try:
            process.wait(STOP_S)
        finally:
            process.kill()
