"""A gateway with PostgreSQL and Redis in front of given engines, for benchmarks and tests.

`Stack` starts embedded servers in its own folder, migrates, and seeds one tenant with a key, SLO classes, a model and
the engines as static instances. `gateway()` starts `python -m api.openai` on it with a policy set: engines,
configuration and client stay the same while policies alternate.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.servers.engines import ROOT, RunningEngine, prefer, running, spawn
from workers.supervisor.embedded import EmbeddedPostgres, EmbeddedRedis
from workers.supervisor.ports import free_port

TENANT = "benchmark"
READY_TIMEOUT_S = 30.0
MANAGE_TIMEOUT_S = 300.0  # on a busy machine


@dataclass(frozen=True, slots=True)
class ClassSpec:
    """An SLO class to seed. The default waiting time drops no request, so that all policies serve the same requests;
    None leaves it to Slackline's own default.
    """

    name: str
    ttft_s: float
    tpot_s: float
    waiting_time_s: float | None = 3600.0


@dataclass(frozen=True, slots=True)
class StackFleet:
    """What is seeded. `coefficients`: fitted latency by name, None without a profile.

    `devices`: the device kind of each URL (empty: all alike), where engines differ; `by_device`: their latencies.
    """

    model: str
    urls: Sequence[str]
    backend: str
    max_num_seqs: int
    classes: Sequence[ClassSpec] = field(default_factory=tuple)
    coefficients: Mapping[str, float] | None = None
    context_tokens: int = 4096
    kv_capacity_tokens: int | None = None
    roles: Sequence[str] = ()  # one per URL; empty: all collocated
    devices: Sequence[str] = ()
    by_device: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    retention_s: int = 0  # of answers that requests ask to be kept
    started: Mapping[str, Any] = field(default_factory=dict)  # start options that tell what the engines choose by
    drop_budget: float = 0.0  # of the coordinator of pruning


class Stack:
    """Owns PostgreSQL and Redis in `folder` while the `with` block lasts."""

    def __init__(self, folder: Path, fleet: StackFleet) -> None:
        self.folder = folder
        self.fleet = fleet
        self.api_key = self.other_api_key = self.limited_api_key = ""
        self.environment: dict[str, str] = {}
        self._exit = contextlib.ExitStack()
        self._servers: tuple[EmbeddedPostgres | EmbeddedRedis, ...] = ()

    def __enter__(self) -> Stack:
        with contextlib.ExitStack() as undo:
            postgres = EmbeddedPostgres(self.folder)
            undo.callback(postgres.stop)
            postgres.start()
            redis = EmbeddedRedis(self.folder)
            undo.callback(redis.stop)
            redis.start()
            self._servers = (postgres, redis)
            for server in self._servers:
                prefer(server.pid or 0, own_niceness())
            self.environment = {
                "DATABASE_URL": postgres.url,
                "REDIS_URL": redis.url,
                "DATA_DIR": str(self.folder),
                "SECRET_KEY": secrets.token_urlsafe(32),
                "LOG_LEVEL": "WARNING",
                "DJANGO_SETTINGS_MODULE": "console.settings",
            }
            self.manage("manage.py", "migrate", "--skip-checks", "--verbosity", "0")
            self.api_key, self.other_api_key, self.limited_api_key = self._seed()
            self._exit = undo.pop_all()
        return self

    def __exit__(self, *error: object) -> None:
        self._exit.close()

    @contextlib.contextmanager
    def stopped(self) -> Iterator[None]:
        """Nothing of Slackline runs in this block: PostgreSQL and Redis are stopped, and start again after it."""
        for server in self._servers:
            server.stop()
        try:
            yield
        finally:
            for server in self._servers:
                server.start()
                prefer(server.pid or 0, own_niceness())

    def processes(self, gateway: RunningEngine) -> dict[str, int]:
        """Process ids of the control plane by name."""
        return {"gateway": gateway.pid, **{server.name: server.pid or 0 for server in self._servers}}

    def manage(self, *command: str, stdin: str = "") -> str:
        """What the command printed. Raises RuntimeError if it fails, subprocess.TimeoutExpired if it hangs."""
        done = subprocess.run(
            [sys.executable, *command],
            input=stdin,
            text=True,
            capture_output=True,
            cwd=ROOT,
            check=False,
            timeout=MANAGE_TIMEOUT_S,
            env={**os.environ, **self.environment, "SLACKLINE_ROLE": "worker"},
        )
        if done.returncode:
            raise RuntimeError(f"{' '.join(command)} failed:\n{done.stdout[-1000:]}{done.stderr[-3000:]}")
        return done.stdout

    def _seed(self) -> tuple[str, str, str]:
        fleet = {**asdict(self.fleet), "tenant": TENANT, "urls": list(self.fleet.urls)}
        answer = self.manage("-m", "benchmarks.servers.seed", stdin=json.dumps(fleet))
        made = json.loads(answer.splitlines()[-1])
        return str(made["api_key"]), str(made["other_api_key"]), str(made["limited_api_key"])

    @contextlib.contextmanager
    def gateway(
        self,
        policy: str | None = None,
        overrides: Mapping[str, Any] | None = None,
        name: str = "gateway",
        gateway_id: str | None = None,
        module: str = "api.openai",
        port: int | None = None,
    ) -> Iterator[RunningEngine]:
        """A running gateway that sees all instances. `policy` None: the gateway's default. `gateway_id`: of an earlier
        one, whose learned state it goes on with; None: one of its own. `module`: what is run; it takes the options of
        `api.openai`. `port`: None: a free one."""
        port = port or free_port()
        environment = {**self.environment, "SLACKLINE_ROLE": "gateway", "GATEWAY_PORT": str(port)}
        if policy is not None:
            environment["DISPATCH_POLICY"] = policy
        environment["DISPATCH_OVERRIDES"] = json.dumps(overrides or {})
        command = [sys.executable, "-m", module, "--port", str(port)]
        command += ["--name", gateway_id] if gateway_id else []
        started = spawn(name, command, port, self.folder / "logs", environment)
        prefer(started.process.pid, own_niceness())
        with running([started], "/healthz") as [gateway]:
            wait_serving(gateway.url, len(self.fleet.urls))
            yield gateway


def own_niceness() -> str:
    """The niceness of what belongs to the caller; only the engines run at BENCH_NICE itself."""
    return str(os.getpriority(os.PRIO_PROCESS, 0))


def wait_serving(url: str, count: int) -> None:
    """Wait until the gateway has a configuration and sees `count` instances up, at most 30 s."""
    deadline = time.monotonic() + READY_TIMEOUT_S
    seen: dict[str, Any] = {}
    while list(seen.get("instances", {}).values()).count("up") < count:
        if time.monotonic() > deadline:
            raise RuntimeError(
                f"the gateway at {url} does not see {count} instances after {READY_TIMEOUT_S:.0f} s: {seen}"
            )
        time.sleep(0.05)
        seen = health(url)


def health(url: str) -> dict[str, Any]:
    """The gateway's /healthz; empty unless it answers 200."""
    try:
        with urllib.request.urlopen(f"{url}/healthz", timeout=5) as reply:
            return dict(json.load(reply))
    except (urllib.error.URLError, OSError):
        return {}
