"""Records the events and actions of a live gateway's scheduler, in three runs against reference engines.

    python -m benchmarks.scheduler_logs tests/controller/simulator/logs

`collocated`: two instances, and more requests than they can take at once. `disaggregated`: two prefill and two decode
instances; some answers are streamed. `failures`: the same fleet and a collocated instance; clients hang up in every
state, some requests may hardly wait, one instance of each kind is killed while it works, and their requests are retried
elsewhere or fail. Each becomes FOLDER/NAME.jsonl.gz, which `python -m controller.simulator replay` must answer
identically. All on 127.0.0.1, about half a minute, without PostgreSQL and Redis.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import gzip
import hashlib
import json
import random
import secrets
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

import aiohttp

from benchmarks.engines import RunningEngine, running, spawn
from controller.core.snapshot import ClassConfig, GatewaySnapshot, KeyConfig, ModelConfig, TenantConfig
from controller.core.types import InstanceSpec, LatencyCoefficients, Role
from workers.supervisor.ports import free_port

KEY = "sk-scheduler-log"
MODEL = "demo"
STEP = ("--profile", "constant:15ms", "--model", MODEL, "--max-model-len", "512", "--max-num-seqs", "6")
KV = ("--kv-blocks", "64", "--kv-layers", "4", "--kv-token-bytes", "256", "--no-enable-prefix-caching")
BELIEVED = LatencyCoefficients(0.015, 1e-6, 0.0, 0.015, 0.0, 1e-5)
SLOW = ("--profile", "constant:120ms")  # if an option is given twice, the engine uses the last one

Fleet = Mapping[str, tuple[Role, Sequence[str]]]
TWO_STAGES: Fleet = {
    "p0": (Role.PREFILL, KV),
    "p1": (Role.PREFILL, KV),
    "d0": (Role.DECODE, KV),
    "d1": (Role.DECODE, KV),
}
RUNS: Mapping[str, Fleet] = {
    "collocated": {"c0": (Role.COLLOCATED, ()), "c1": (Role.COLLOCATED, ())},
    "disaggregated": TWO_STAGES,
    "failures": {
        "p0": (Role.PREFILL, (*KV, *SLOW)),
        "p1": (Role.PREFILL, (*KV, *SLOW)),
        "d0": (Role.DECODE, KV),
        "d1": (Role.DECODE, KV),
        "c0": (Role.COLLOCATED, KV),
    },
}
REQUESTS = 60
RATES = {"collocated": 80.0, "disaggregated": 25.0, "failures": 25.0}  # requests/s
SEED = 1


def engine(
    name: str, role: Role, options: Sequence[str], folder: Path, environment: Mapping[str, str]
) -> RunningEngine:
    port = free_port()
    command = [sys.executable, "-m", "workers.engine", "--host", "127.0.0.1", "--port", str(port), *STEP, *options]
    if role is not Role.COLLOCATED:
        command += ["--role", role.value]
    return spawn(name, command, port, folder, environment)


def snapshot(engines: Sequence[RunningEngine], fleet: Fleet) -> GatewaySnapshot:
    """The gateway's configuration: one tenant, a tight and a patient class."""
    specs = tuple(
        InstanceSpec(each.id, MODEL, each.url, "reference", fleet[each.id][0], 6, latency=BELIEVED) for each in engines
    )
    return GatewaySnapshot(
        version=1,
        tenants=(TenantConfig(1, "acme", "patient"),),
        keys=(KeyConfig(1, "acme", hashlib.sha256(KEY.encode()).hexdigest(), KEY[:6]),),
        classes=(
            ClassConfig("tight", None, 0.3, 0.05, None, 1.0, 0.95, 1.0),
            ClassConfig("patient", None, 5.0, 0.2, None, 10.0, 0.95, 1.0),
            ClassConfig("hurried", None, 5.0, 0.2, None, 0.05, 0.95, 1.0),  # expires in the queue
        ),
        models=(ModelConfig(MODEL, (), context_tokens=512),),
        instances=specs,
        telemetry_period_s=0.5,
    )


async def ask(
    session: aiohttp.ClientSession, rng: random.Random, hangs_up: bool, classes: Sequence[str], longest: int
) -> None:
    """Send one request, whatever its answer."""
    body = {
        "model": MODEL,
        "prompt": [rng.randrange(1, 100) for _ in range(rng.randrange(4, 300))],
        "max_tokens": rng.choice((1, 4, 12, longest)),
        "ignore_eos": True,
        "stream": rng.random() < 0.7,
        "slo_class": rng.choice(classes),
    }
    patience_s = rng.uniform(0.0, 0.4) if hangs_up else 60.0
    with contextlib.suppress(aiohttp.ClientError, TimeoutError):
        async with asyncio.timeout(patience_s), session.post("/v1/completions", json=body) as answer:
            await answer.read()


async def load(url: str, engines: Sequence[RunningEngine], rate: float, *, failing: bool) -> None:
    """The requests of a run; with `failing`, an engine of each kind is killed in the middle of it."""
    rng = random.Random(SEED)
    headers = {"authorization": f"Bearer {KEY}"}
    async with aiohttp.ClientSession(url, headers=headers) as session:
        asked = []
        longest = 100 if failing else 30  # long enough that an engine is killed behind the first token
        classes = ("tight", "patient", "patient", "hurried") if failing else ("tight", "patient", "patient")
        for index in range(REQUESTS):
            hangs_up = failing and rng.random() < 0.3
            asked.append(asyncio.create_task(ask(session, random.Random(rng.random()), hangs_up, classes, longest)))
            for at, name in ((20, "p0"), (35, "d0"), (50, "c0")):
                if failing and index == at:
                    next(each for each in engines if each.id == name).kill()
            await asyncio.sleep(rng.expovariate(rate))
        await asyncio.gather(*asked)
        await asyncio.sleep(3.0)  # for late releases, and repeated ones


async def serving(url: str, count: int) -> None:
    async with aiohttp.ClientSession(url) as session, asyncio.timeout(60.0):
        while True:
            async with session.get("/healthz") as answer:
                states = (await answer.json())["instances"].values()
            if list(states).count("up") == count:
                return
            await asyncio.sleep(0.1)


def record(name: str, fleet: Fleet, folder: Path) -> Path:
    """One run; the log that its gateway wrote."""
    environment = {
        "SECRET_KEY": secrets.token_urlsafe(32),
        "FLEET_TOKEN": secrets.token_urlsafe(32),
        "DATA_DIR": str(folder),
        "DJANGO_SETTINGS_MODULE": "console.settings",
        "LOG_LEVEL": "WARNING",
    }
    log, config, port = folder / f"{name}.jsonl", folder / "snapshot.json", free_port()
    with running(engine(each, *wanted, folder / "logs", environment) for each, wanted in fleet.items()) as engines:
        config.write_text(json.dumps(asdict(snapshot(engines, fleet))))
        command = [sys.executable, "-m", "api.openai", "--port", str(port), "--snapshot", str(config)]
        started = spawn("gateway", [*command, "--scheduler-log", str(log)], port, folder / "logs", environment)
        with running([started], "/healthz"):
            asyncio.run(serving(started.url, len(engines)))
            asyncio.run(load(started.url, engines, RATES[name], failing=name == "failures"))
    return log


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--only", choices=sorted(RUNS), help="one of the runs")
    arguments = parser.parse_args()
    arguments.folder.mkdir(parents=True, exist_ok=True)
    for name, fleet in RUNS.items():
        if arguments.only not in (None, name):
            continue
        with tempfile.TemporaryDirectory() as folder:
            raw = record(name, fleet, Path(folder)).read_bytes()
        packed = arguments.folder / f"{name}.jsonl.gz"
        packed.write_bytes(gzip.compress(raw, mtime=0))
        lines = raw.count(b"\n")
        print(f"{packed}: {lines - 1} batches, {packed.stat().st_size} bytes")


if __name__ == "__main__":
    main()
