"""`make bench-memory`: proportional set size (PSS) of gateway, engine and the whole of `make up`.

Gateway: 10,000 requests with bodies of 1 kB are queued, each on its own open connection, while its only engine is full.
Engine: a reference engine that has served. `make up`: every process below the supervisor, idle, without demo load.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import resource
import signal
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import psutil
import uvloop

from benchmarks.bench_overhead import MODEL, constant_profile
from benchmarks.load.trials import note
from benchmarks.servers.engines import RunningEngine, answers, reference_engines, spawn, stop_on_sigterm
from benchmarks.servers.stack import ClassSpec, Stack, StackFleet, health
from workers.supervisor.ports import free_port

QUEUED = 10_000
BODY_BYTES = 1000
LIMITS_MB = {"gateway_queued_pss_mb": 250, "engine_pss_mb": 150, "up_idle_pss_mb": 1500}
UP_TIMEOUT_S = 180.0
SETTLE_S = 20.0
FULL_SLOTS = 2
# Long enough that no request expires or is refused while the queue is built.
PATIENT = ClassSpec("patient", 3000.0, 100.0)


def pss_mb(pid: int) -> float:
    """Proportional set size of a process and all its descendants, MB."""
    return sum(by_process(pid).values())


def by_process(pid: int) -> dict[str, float]:
    """PSS in MB by command line; processes that end meanwhile are not counted."""
    found: dict[str, float] = {}
    parent = psutil.Process(pid)
    for process in (parent, *parent.children(recursive=True)):
        with contextlib.suppress(psutil.NoSuchProcess):
            name = f"{process.pid} {' '.join(process.cmdline())[:90]}"
            found[name] = process.memory_full_info().pss / 1e6
    return found


def _request(host: str, api_key: str) -> bytes:
    body = {"model": MODEL, "max_tokens": 512, "stream": True, "slo_class": PATIENT.name, "prompt": ""}
    body["prompt"] = "x" * (BODY_BYTES - len(json.dumps(body)))
    raw = json.dumps(body).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: {host}\r\nAuthorization: Bearer {api_key}\r\n"
    return f"{head}Content-Type: application/json\r\nContent-Length: {len(raw)}\r\n\r\n".encode() + raw


async def hold(url: str, api_key: str, count: int, queued: asyncio.Event, release: asyncio.Event) -> int:
    """Keep `count` requests open until released. Returns how many were answered or cut before."""
    host = url.removeprefix("http://")
    name, port = host.split(":")
    raw = _request(host, api_key)
    writers: list[asyncio.StreamWriter] = []
    readers: list[asyncio.StreamReader] = []
    for _ in range(count):
        reader, writer = await asyncio.open_connection(name, int(port), limit=2048)
        writer.write(raw)
        readers.append(reader)
        writers.append(writer)
        if len(writers) % 200 == 0:
            await asyncio.gather(*(writer.drain() for writer in writers[-200:]))
            await asyncio.sleep(0.05)
    queued.set()
    await release.wait()
    early = sum(reader.at_eof() for reader in readers)
    for writer in writers:
        writer.close()
    return early


async def fill(gateway: RunningEngine, api_key: str, count: int) -> dict[str, Any]:
    queued, release = asyncio.Event(), asyncio.Event()
    holding = asyncio.create_task(hold(gateway.url, api_key, count, queued, release))
    waiting = asyncio.create_task(queued.wait())
    await asyncio.wait([holding, waiting], return_when=asyncio.FIRST_COMPLETED)
    await asyncio.sleep(3)
    length = (await asyncio.to_thread(health, gateway.url)).get("queued", 0)
    figures = {"queued": length, "gateway_queued_pss_mb": round(pss_mb(gateway.pid), 1)}
    release.set()
    early = await holding
    if early or length < count - 2 * FULL_SLOTS:
        raise RuntimeError(f"only {length} of {count} requests were queued ({early} were answered early)")
    return figures


def gateway_and_engine(folder: Path, count: int) -> dict[str, Any]:
    options = ("--profile", "constant:1s", "--model", MODEL, "--max-num-seqs", str(FULL_SLOTS))
    with reference_engines(1, folder / "logs", *options) as [engine]:
        coefficients = {**constant_profile(), "prefill_a": 1.0, "decode_a": 1.0}
        fleet = StackFleet(MODEL, [engine.url], "reference", FULL_SLOTS, [PATIENT], coefficients)
        os.environ["HTTP_CONNECTIONS_PER_ADDRESS"] = str(2 * QUEUED)  # all clients are on this machine
        with Stack(folder / "data", fleet) as stack, stack.gateway() as gateway:
            idle = pss_mb(gateway.pid)
            note(f"queueing {count} requests")
            figures = uvloop.run(fill(gateway, stack.api_key, count))
            return {"gateway_idle_pss_mb": round(idle, 1), **figures, "engine_pss_mb": round(pss_mb(engine.pid), 1)}


def whole(folder: Path) -> dict[str, Any]:
    """PSS of every process of `make up` over new data, without demo load, after it has settled."""
    ports = {"GATEWAY_PORT": str(free_port()), "CONSOLE_PORT": str(free_port())}
    environment = {**ports, "DATA_DIR": str(folder / "up"), "DEMO_LOAD": "0"}
    command = [sys.executable, "-m", "workers.supervisor", "up"]
    note("starting everything")
    up = spawn("up", command, int(ports["CONSOLE_PORT"]), folder / "logs", environment)
    try:
        deadline = time.monotonic() + UP_TIMEOUT_S
        while not answers(up.url, "/healthz"):
            if up.process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"make up is not ready; {up.log.read_text(errors='replace')[-2000:]}")
            time.sleep(0.5)
        time.sleep(SETTLE_S)
        processes = by_process(up.pid)
    finally:
        up.process.send_signal(signal.SIGINT)
        up.process.wait(60)
    return {"up_idle_pss_mb": round(sum(processes.values()), 1), "up_processes": _rounded(processes)}


def _rounded(processes: Mapping[str, float]) -> dict[str, float]:
    return {name.split(" ", 1)[1]: round(mb, 1) for name, mb in sorted(processes.items(), key=lambda item: -item[1])}


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.bench_memory", description="Memory (PSS).")
    parser.add_argument("--queued", type=int, default=QUEUED)
    parser.add_argument("--skip-up", action="store_true", help="do not measure `make up`")
    arguments = parser.parse_args()
    stop_on_sigterm()
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = min(hard, 4 * arguments.queued)
    resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    with tempfile.TemporaryDirectory(prefix="slackline-bench-") as name:
        folder = Path(name)
        folder.chmod(0o755)  # PostgreSQL runs as another user
        figures = gateway_and_engine(folder, arguments.queued)
        if not arguments.skip_up:
            figures |= whole(folder)
    for key, limit in LIMITS_MB.items():
        if key in figures:
            print(f"{key:28}{figures[key]:>10.1f} MB   at most {limit} MB")
    for name, size in figures.get("up_processes", {}).items():
        print(f"    {size:>8.1f} MB  {name}")
    print(json.dumps(figures))
    return 0


if __name__ == "__main__":
    os.environ.setdefault("PYTHONUNBUFFERED", "1")
    sys.exit(main())
