"""`make bench-walks`: the files of the tree that one request passes, in the order in which it first enters them.

A gateway in this process serves one streamed `POST /v1/completions` by real reference engines on loopback, first
collocated, then disaggregated, while every call of a Python function is traced. Counted are files of `api/`,
`controller/` and `workers/` that run a function between the call of the ASGI application and the record of the request;
what the engines' processes run, telemetry and other background work are left out. One request goes before, so that
imports and first connections do not count.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import json
import secrets
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import Any

import aiohttp

from api.openai.app import OpenAIApp
from api.openai.gateway import Gateway, GatewayOptions
from benchmarks.engines import ROOT, reference_engines, stop_on_sigterm
from controller.core.records import RequestRecord
from controller.core.snapshot import ClassConfig, GatewaySnapshot, KeyConfig, ModelConfig, TenantConfig
from controller.core.types import InstanceSpec, Role

PACKAGES = ("api", "controller", "workers")
MODEL = "walked"
KEY = "sk-walks-on-this-machine-only"
SHAPES = {
    "collocated": (Role.COLLOCATED,),
    "disaggregated": (Role.PREFILL, Role.DECODE),
}
SETTLE_S = 0.5  # after the last byte: the record is written, kept KV is freed


class Tracer:
    """Files of ours whose functions run, in the order of their first call. Used as a `sys.setprofile` function."""

    def __init__(self) -> None:
        self.files: dict[str, None] = {}
        self._roots = tuple(f"{ROOT / package}/" for package in PACKAGES)

    def __call__(self, frame: FrameType, event: str, argument: object) -> None:
        if event == "call" and (name := frame.f_code.co_filename).startswith(self._roots):
            self.files.setdefault(name.removeprefix(f"{ROOT}/"), None)


class Sink:
    """Where the gateway leaves finished requests."""

    def __init__(self) -> None:
        self.records: list[RequestRecord] = []

    def add(self, record: RequestRecord) -> None:
        self.records.append(record)


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
    """One streamed completion; the status of its answer."""
    body = json.dumps({"model": MODEL, "prompt": list(range(3, 67)), "max_tokens": 4, "stream": True}).encode()
    parts = [{"type": "http.request", "body": body, "more_body": False}]
    ended, statuses = asyncio.Event(), []

    async def receive() -> dict[str, Any]:
        if parts:
            return parts.pop()
        await ended.wait()
        return {"type": "http.disconnect"}

    async def send(message: dict[str, Any]) -> None:
        if message["type"] == "http.response.start":
            statuses.append(message["status"])
        elif not message.get("more_body"):
            ended.set()

    headers = [(b"authorization", f"Bearer {KEY}".encode()), (b"content-type", b"application/json")]
    await app({"type": "http", "path": "/v1/completions", "method": "POST", "headers": headers}, receive, send)
    await asyncio.sleep(SETTLE_S)
    return statuses[0]


async def walk(urls: Sequence[str], roles: Sequence[Role]) -> list[str]:
    """The files passed by the second of two requests. Raises RuntimeError where it was not served as `roles` say."""
    sink = Sink()
    async with aiohttp.ClientSession() as session:
        gateway = Gateway(GatewayOptions("walks"), session, sink)

        async def start() -> Gateway:
            return gateway

        async def stop() -> None:
            gateway.closing = True

        app = OpenAIApp(start, stop)
        app._gateway = gateway
        gateway.configure(configuration(urls, roles))
        await gateway.monitor.settle(10)
        if await complete(app) != 200:
            raise RuntimeError("the request before the traced one was not served")
        tracer = Tracer()
        sys.setprofile(tracer)
        status = await complete(app)
        sys.setprofile(None)
        await gateway.runtime.drain(1)
    placed = [step["kind"] for step in sink.records[-1].decisions].count("place")
    if status != 200 or placed != len(roles) - 1:
        raise RuntimeError(f"answered {status}, placed {placed} times: not the walk that was asked for")
    return list(tracer.files)


def walks() -> dict[str, list[str]]:
    """By shape of the fleet, the files that a request passes."""
    found: dict[str, list[str]] = {}
    environment = {"FLEET_TOKEN": secrets.token_urlsafe(16)}
    options = ("--profile", "constant:2ms", "--model", MODEL, "--max-num-seqs", "8", "--max-model-len", "2048")
    for shape, roles in SHAPES.items():
        with (
            tempfile.TemporaryDirectory(prefix="slackline-walks-") as folder,
            reference_engines(len(roles), Path(folder), *options, environment=environment) as engines,
        ):
            found[shape] = asyncio.run(walk([engine.url for engine in engines], roles))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.parse_args()
    stop_on_sigterm()
    found = walks()
    for shape, files in found.items():
        print(f"{shape}: {len(files)} files")
        for number, file in enumerate(files, 1):
            print(f"  {number:3d}  {file}")
    print(json.dumps({"benchmark": "walks", **{shape: len(files) for shape, files in found.items()}}))


if __name__ == "__main__":
    main()
