"""`make bench-walks`: the files of the tree that one request passes, in the order in which it first enters them.

A gateway in this process serves one streamed `POST /v1/completions` by real reference engines on loopback, first
collocated, then disaggregated. Every call of a Python function is traced, here and in the engine processes. Counted are
files of `api/`, `controller/` and `workers/` that run a function between the call of the ASGI application and the
record of the request. Telemetry and other background work of the gateway are left out; an engine's loop has no other
work. A first request is not counted, so that imports and first connections do not appear.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import hashlib
import json
import secrets
import signal
import sys
import tempfile
import time
from collections.abc import MutableMapping, Sequence
from pathlib import Path
from typing import Any

import aiohttp

from api.openai.app import OpenAIApp
from api.openai.gateway import Gateway, GatewayOptions
from benchmarks.servers.engines import RunningEngine, reference_engines, stop_on_sigterm
from benchmarks.servers.traced_engine import Tracer
from controller.core.snapshot import ClassConfig, GatewaySnapshot, KeyConfig, ModelConfig, TenantConfig
from controller.core.types import InstanceSpec, RequestRecord, Role, WorkflowCancellation

MODEL = "walked"
KEY = "sk-walks-on-this-machine-only"
SHAPES = {
    "collocated": (Role.COLLOCATED,),
    "disaggregated": (Role.PREFILL, Role.DECODE),
}
SETTLE_S = 0.5  # after the last byte, until the record is written and kept KV is freed


class RecordList:
    """Receives the gateway's finished requests."""

    def __init__(self) -> None:
        self.records: list[RequestRecord] = []

    def add(self, record: RequestRecord) -> None:
        self.records.append(record)

    def cancelled(self, cancellation: WorkflowCancellation) -> None:
        """None of the walks cancels a workflow."""


def configuration(urls: Sequence[str], roles: Sequence[Role]) -> GatewaySnapshot:
    key = KeyConfig(id=1, tenant="walker", sha256=hashlib.sha256(KEY.encode()).hexdigest(), prefix=KEY[:6])
    instances = tuple(
        InstanceSpec(f"{role.value}-{index}", MODEL, url, backend="reference", role=role, max_num_seqs=8)
        for index, (url, role) in enumerate(zip(urls, roles, strict=True))
    )
    return GatewaySnapshot(
        version=1,
        tenants=(TenantConfig(1, "walker", "interactive"),),
        keys=(key,),
        classes=(ClassConfig("interactive", None, 5.0, 0.5, None, 10.0, 0.95, 1.0),),
        models=(ModelConfig(MODEL, (), context_tokens=2048),),
        instances=instances,
    )


async def complete(app: OpenAIApp) -> int:
    """Send one streamed completion; returns the status of its answer."""
    body = json.dumps({"model": MODEL, "prompt": list(range(3, 67)), "max_tokens": 4, "stream": True}).encode()
    parts = [{"type": "http.request", "body": body, "more_body": False}]
    ended, statuses = asyncio.Event(), []

    async def receive() -> dict[str, Any]:
        if parts:
            return parts.pop()
        await ended.wait()
        return {"type": "http.disconnect"}

    async def send(message: MutableMapping[str, Any]) -> None:
        if message["type"] == "http.response.start":
            statuses.append(message["status"])
        elif not message.get("more_body"):
            ended.set()

    headers = [(b"authorization", f"Bearer {KEY}".encode()), (b"content-type", b"application/json")]
    await app({"type": "http", "path": "/v1/completions", "method": "POST", "headers": headers}, receive, send)
    await asyncio.sleep(SETTLE_S)
    return statuses[0]


def toggle(engines: Sequence[RunningEngine]) -> None:
    """Begin or end the traces of the engine processes."""
    for engine in engines:
        engine.process.send_signal(signal.SIGUSR1)


async def walk(engines: Sequence[RunningEngine], roles: Sequence[Role]) -> list[str]:
    """The gateway's files passed by the second of two requests; the engines write their own.

    Raises RuntimeError if the request was not served as `roles` require.
    """
    sink = RecordList()
    async with aiohttp.ClientSession() as session:
        gateway = Gateway(GatewayOptions("walks"), session, sink)

        async def start() -> Gateway:
            return gateway

        async def stop() -> None:
            gateway.closing = True

        app = OpenAIApp(start, stop)
        app._gateway = gateway
        gateway.configure(configuration([engine.url for engine in engines], roles))
        await gateway.monitor.settle(10)
        if await complete(app) != 200:
            raise RuntimeError("the request before the traced one was not served")
        tracer = Tracer()
        toggle(engines)
        sys.setprofile(tracer)
        status = await complete(app)
        sys.setprofile(None)
        toggle(engines)
        await gateway.runtime.drain(1)
    placed = [step["kind"] for step in sink.records[-1].decisions].count("place")
    if status != 200 or placed != len(roles) - 1:
        raise RuntimeError(f"answered {status}, placed {placed} times: not the walk that was asked for")
    return list(tracer.files)


def walks() -> dict[str, dict[str, list[str]]]:
    """By fleet, the files that a request passes in the gateway and in its engines."""
    found: dict[str, dict[str, list[str]]] = {}
    environment = {"FLEET_TOKEN": secrets.token_urlsafe(16)}
    options = ("--profile", "constant:2ms", "--model", MODEL, "--max-num-seqs", "8", "--max-model-len", "2048")
    for shape, roles in SHAPES.items():
        with tempfile.TemporaryDirectory(prefix="slackline-walks-") as name, contextlib.ExitStack() as stack:
            folder, engines, traces = Path(name), list[RunningEngine](), list[Path]()
            for index in range(len(roles)):
                traces.append(folder / f"engine-{index}.files")
                before = (sys.executable, "-m", "benchmarks.servers.traced_engine", str(traces[-1]))
                started = reference_engines(1, folder, *options, environment=environment, before=before)
                engines += stack.enter_context(started)
            gateway = asyncio.run(walk(engines, roles))
            passed = (file for trace in traces for file in written(trace))
            found[shape] = {"gateway": gateway, "engines": list(dict.fromkeys(passed))}
    return found


def written(trace: Path) -> list[str]:
    """What an engine wrote when its trace ended. Raises RuntimeError if it wrote nothing within five seconds."""
    deadline = time.monotonic() + 5.0
    while not trace.exists() or not trace.read_text():
        if time.monotonic() > deadline:
            raise RuntimeError("an engine wrote no trace")
        time.sleep(0.02)
    return trace.read_text().splitlines()


def distinct(parts: dict[str, list[str]]) -> list[str]:
    """The number of files; one that both sides pass counts once."""
    return list(dict.fromkeys(file for files in parts.values() for file in files))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.parse_args()
    stop_on_sigterm()
    found = walks()
    for shape, parts in found.items():
        print(f"{shape}: {len(distinct(parts))} files")
        for part, files in parts.items():
            print(f"  {part}: {len(files)}")
            for number, file in enumerate(files, 1):
                print(f"    {number:3d}  {file}")
    counts = {
        shape: {"all": len(distinct(parts)), **{part: len(files) for part, files in parts.items()}}
        for shape, parts in found.items()
    }
    print(json.dumps({"benchmark": "walks", **counts}))


if __name__ == "__main__":
    main()
