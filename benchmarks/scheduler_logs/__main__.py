"""Records the events and actions of a live gateway's scheduler, in five runs against reference engines.

    python -m benchmarks.scheduler_logs tests/controller/simulator/logs

`collocated`: two instances, and more requests than they can take at once. `disaggregated`: two prefill and two decode
instances; some answers are streamed, and some end with their first token. `failures`: the same fleet and a collocated
instance; clients hang up in every state, some requests may hardly wait, one instance of each kind is killed while it
works, and their requests are retried elsewhere or fail. `operated`: requests that wait are paused, resumed, given
another priority and cancelled by commands from Redis, an instance is drained and comes back, and a model has no
instance until one is announced. `stranded`: a prefill instance that keeps KV is stopped (SIGSTOP), and the only decode
instance ends. Each becomes FOLDER/NAME.jsonl.gz, which `python -m controller.simulator replay` must answer identically.
All on 127.0.0.1, about a minute, without PostgreSQL.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import gzip
import hashlib
import json
import os
import random
import secrets
import signal
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import aiohttp

from benchmarks.servers.engines import RunningEngine, running, spawn
from controller.core.snapshot import ClassConfig, GatewaySnapshot, KeyConfig, ModelConfig, TenantConfig
from controller.core.types import InstanceSpec, LatencyCoefficients, Role
from workers.engine.text.pseudo_text import VOCABULARY
from workers.supervisor.embedded import EmbeddedRedis
from workers.supervisor.ports import free_port

KEY = "sk-scheduler-log"
MODEL = "demo"
ABSENT = "absent"  # a model without an instance
STEP = ("--profile", "constant:15ms", "--model", MODEL, "--max-model-len", "512", "--max-num-seqs", "6")
KV = ("--kv-blocks", "64", "--kv-layers", "4", "--kv-token-bytes", "256", "--no-enable-prefix-caching")
BELIEVED = LatencyCoefficients(0.015, 1e-6, 0.0, 0.015, 0.0, 1e-5)
SLOWER = ("--profile", "constant:250ms")
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
    "operated": {"c0": (Role.COLLOCATED, SLOWER), "c1": (Role.COLLOCATED, SLOWER)},
    "stranded": {"p0": (Role.PREFILL, KV), "p1": (Role.PREFILL, KV), "d0": (Role.DECODE, KV)},
}
REQUESTS = 60
RATES = {"collocated": 80.0, "disaggregated": 25.0, "failures": 25.0, "operated": 15.0, "stranded": 12.0}  # requests/s
SETTLE_S = {"stranded": 12.0}  # the releases of KV that nobody confirms are repeated and then given up
ENDS_AT_ONCE = {"disaggregated": 0.15}  # requests whose first token ends the answer: no decode stage follows
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
        models=(ModelConfig(MODEL, (), context_tokens=512), ModelConfig(ABSENT, (), context_tokens=512)),
        instances=specs,
        telemetry_period_s=0.5,
    )


async def ask(
    session: aiohttp.ClientSession,
    rng: random.Random,
    hangs_up: bool,
    classes: Sequence[str],
    longest: int,
    ends_at_once: float = 0.0,
    model: str = MODEL,
) -> None:
    """Send one request, whatever its answer."""
    body = {
        "model": model,
        "prompt": [rng.randrange(1, 100) for _ in range(rng.randrange(4, 300))],
        "max_tokens": rng.choice((1, 4, 12, longest)),
        "ignore_eos": True,
        "stream": rng.random() < 0.7,
        "slo_class": rng.choice(classes),
    }
    if ends_at_once and rng.random() < ends_at_once:
        body["stop_token_ids"] = sorted(set(VOCABULARY))
    patience_s = rng.uniform(0.0, 0.4) if hangs_up else 60.0
    with contextlib.suppress(aiohttp.ClientError, TimeoutError):
        async with asyncio.timeout(patience_s), session.post("/v1/completions", json=body) as answer:
            await answer.read()


class Disturbance:
    """What happens in a run beside its requests: by the index of the request before which it happens."""

    def __init__(self, name: str, engines: Sequence[RunningEngine], log: Path, config: Path) -> None:
        self._engines = {each.id: each for each in engines}
        self._log, self._config = log, config
        runs: dict[str, dict[int, Callable[[], None]]] = {
            "failures": {
                20: lambda: self._kill("p0"),
                35: lambda: self._kill("d0"),
                50: lambda: self._kill("c0"),
            },
            "operated": {
                8: lambda: self._configure(coming=[{"id": "soon", "model": ABSENT, "not_before": 0.0}]),
                20: lambda: self._command("pause", 4),
                24: lambda: self._command("reprioritise", 3, priority=5),
                28: lambda: self._command("cancel", 2),
                30: lambda: self._configure(draining=["c1"], coming=[]),
                50: lambda: self._command("resume", 20),
                52: lambda: self._configure(draining=[]),
            },
            "stranded": {25: lambda: self._stop("p1"), 45: lambda: self._kill("d0")},
        }
        self._planned = runs.get(name, {})

    async def before(self, index: int) -> None:
        if index in self._planned:
            await asyncio.to_thread(self._planned[index])

    def over(self) -> None:
        """Let engines that stand still go on, or nobody could end them."""
        for each in self._engines.values():
            with contextlib.suppress(ProcessLookupError):
                os.kill(each.pid, signal.SIGCONT)

    def _kill(self, name: str) -> None:
        self._engines[name].kill()

    def _stop(self, name: str) -> None:
        os.kill(self._engines[name].pid, signal.SIGSTOP)

    def _configure(self, **changes: Any) -> None:
        """The gateway reads its file again."""
        self._config.write_text(json.dumps(json.loads(self._config.read_text()) | changes))

    def _command(self, kind: str, count: int, priority: int | None = None) -> None:
        """For the first requests that wait, as the log tells. What was sent meanwhile is answered as `too_late`."""
        from workers.live import send_command

        send_command("recorder", kind, self._waiting()[:count], priority)

    def _waiting(self) -> list[str]:
        waiting: dict[str, None] = {}
        for line in self._log.read_text().splitlines()[1:]:
            batch = json.loads(line)
            for kind, *fields in batch["events"]:
                if kind == "Arrived":
                    waiting[fields[0]["request"]["id"]] = None
            for kind, *fields in batch["actions"]:
                if kind in ("Send", "Refuse", "Drop"):
                    waiting.pop(fields[0]["request"], None)
        return list(waiting)


async def load(name: str, url: str, disturbance: Disturbance) -> None:
    """The requests of a run."""
    rng, failing = random.Random(SEED), name in ("failures", "stranded")
    headers = {"authorization": f"Bearer {KEY}"}
    async with aiohttp.ClientSession(url, headers=headers) as session:
        asked = []
        longest = 100 if failing else 30  # long enough that an engine is killed behind the first token
        classes = ("tight", "patient", "patient", "hurried") if failing else ("tight", "patient", "patient")
        for index in range(REQUESTS):
            hangs_up = failing and rng.random() < 0.3
            model = ABSENT if name == "operated" and index % 6 == 5 else MODEL
            one = ask(
                session, random.Random(rng.random()), hangs_up, classes, longest, ENDS_AT_ONCE.get(name, 0.0), model
            )
            asked.append(asyncio.create_task(one))
            await disturbance.before(index)
            await asyncio.sleep(rng.expovariate(RATES[name]))
        await asyncio.gather(*asked)
        await asyncio.sleep(SETTLE_S.get(name, 3.0))  # for late releases, and repeated ones


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
    redis = EmbeddedRedis(folder)
    redis.start()
    os.environ |= {**environment, "REDIS_URL": redis.url}  # for the commands that this process sends
    try:
        with running(engine(each, *wanted, folder / "logs", environment) for each, wanted in fleet.items()) as engines:
            config.write_text(json.dumps(asdict(snapshot(engines, fleet))))
            command = [sys.executable, "-m", "benchmarks.scheduler_logs.gateway", str(port), str(config), str(log)]
            disturbance = Disturbance(name, engines, log, config)
            started = spawn("gateway", command, port, folder / "logs", {**environment, "REDIS_URL": redis.url})
            try:
                with running([started], "/healthz"):
                    asyncio.run(serving(started.url, len(engines)))
                    asyncio.run(load(name, started.url, disturbance))
            finally:
                disturbance.over()
    finally:
        redis.stop()
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
