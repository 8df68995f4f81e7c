"""The whole of `make up` for a benchmark of the console: own folder and ports, fast engines, a class for probes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar

from benchmarks.console.live import PROBE
from benchmarks.servers.engines import ROOT, reference_engines
from workers.supervisor.ports import free_port

READY_S = 240.0
STOP_S = 60.0
MODEL = "constant"
STEP = "constant:2ms"
MAX_NUM_SEQS = 256
SETUP = f"""
import json, os, sys, django
django.setup()
from controller.models import Tenant
from controller.services import instances, served_models, slo_classes
from controller.services.actors import Actor
actor, urls = Actor.job("benchmark"), json.load(sys.stdin)
model = served_models.served_model_create(actor=actor, name="{MODEL}", context_tokens=4096)
for name, ttft_s in (("{PROBE}", 5.0), ("steady", 5.0)):
    slo_classes.slo_class_create(actor=actor, name=name, ttft_s=ttft_s, tpot_s=0.5)
Tenant.objects.update(rpm=None, tpm=None, max_concurrency=None)
for index, url in enumerate(urls):
    row = instances.instance_register(actor=actor, id=f"constant-{{index}}", model=model, url=url, backend="reference",
        max_num_seqs={MAX_NUM_SEQS}, spec={{"max_model_len": 4096}})
    instances.instance_observe(instance_id=row.id, observed_state="ready")
"""


class Running:
    """A running Slackline whose model `constant` answers at once."""

    body: ClassVar[dict[str, Any]] = {
        "model": MODEL,
        "prompt": list(range(3, 67)),
        "max_tokens": 4,
        "ignore_eos": True,
        "slo_class": "steady",
    }

    def __init__(self, folder: Path, gateway_port: int, console_port: int) -> None:
        self.folder = folder
        self.gateway, self.console = f"http://127.0.0.1:{gateway_port}", f"http://127.0.0.1:{console_port}"

    @property
    def credentials(self) -> dict[str, Any]:
        return dict(json.loads((self.folder / "credentials.json").read_text()))

    @property
    def api_key(self) -> str:
        return str(self.credentials["api_key"])

    def person(self, role: str) -> tuple[str, str]:
        known = self.credentials
        return known[role], known[f"{role}_password"]

    def pid(self, name: str) -> int:
        running = json.loads((self.folder / "processes.json").read_text())
        return next(int(each["pid"]) for each in running if each["name"] == name)


@contextmanager
def started(engines: int = 1) -> Iterator[Running]:
    """Without demo load; everything is stopped and removed at the end."""
    with tempfile.TemporaryDirectory(prefix="slackline-bench-") as name:
        folder = Path(name)
        folder.chmod(0o755)  # PostgreSQL may run as another user
        stack = Running(folder, free_port(), free_port())
        ports = {"GATEWAY_PORT": stack.gateway.rsplit(":", 1)[1], "CONSOLE_PORT": stack.console.rsplit(":", 1)[1]}
        env = {**os.environ, "DATA_DIR": str(folder), "DEMO_LOAD": "0", **ports}
        for foreign in ("DATABASE_URL", "REDIS_URL", "SLACKLINE_ROLE", "SECRET_KEY", "DJANGO_SETTINGS_MODULE"):
            env.pop(foreign, None)
        options = ("--profile", STEP, "--model", MODEL, "--max-num-seqs", str(MAX_NUM_SEQS))
        log = folder / "up.log"
        with log.open("w") as output, reference_engines(engines, folder / "logs", *options) as fleet:
            command = [sys.executable, "-m", "workers.supervisor", "up"]
            process = subprocess.Popen(command, cwd=ROOT, env=env, stdout=output, stderr=subprocess.STDOUT)
            try:
                _wait_ready(stack, process, log)
                _set_up(stack, env, [engine.url for engine in fleet])
                yield stack
            finally:
                process.send_signal(signal.SIGTERM)
                try:
                    process.wait(STOP_S)
                finally:
                    process.kill()


def _set_up(stack: Running, env: dict[str, str], urls: list[str]) -> None:
    """The model, its classes and engines, through the services; then wait until the gateway serves it."""
    found = Path(f"/proc/{stack.pid('console')}/environ").read_bytes().split(b"\0")
    told = dict(each.decode().split("=", 1) for each in found if b"=" in each)
    names = ("DATABASE_URL", "REDIS_URL", "SECRET_KEY", "DATA_DIR")
    given = {**env, **{name: told[name] for name in names if name in told}}
    given |= {"SLACKLINE_ROLE": "worker", "DJANGO_SETTINGS_MODULE": "console.settings"}
    subprocess.run([sys.executable, "-c", SETUP], input=json.dumps(urls), text=True, check=True, cwd=ROOT, env=given)
    request = urllib.request.Request(
        f"{stack.gateway}/v1/completions",
        data=json.dumps(Running.body).encode(),
        headers={"Authorization": f"Bearer {stack.api_key}", "Content-Type": "application/json"},
    )
    give_up_at = time.monotonic() + READY_S
    while True:
        try:
            with urllib.request.urlopen(request, timeout=5) as answer:
                if answer.status == 200:
                    return
        except (urllib.error.URLError, OSError) as error:
            if time.monotonic() > give_up_at:
                raise RuntimeError(f"the gateway does not serve {MODEL}: {error}") from error
        time.sleep(0.5)


def _wait_ready(stack: Running, process: subprocess.Popen[bytes], log: Path) -> None:
    give_up_at = time.monotonic() + READY_S
    while time.monotonic() < give_up_at:
        if process.poll() is not None:
            raise RuntimeError(f"the stack ended by itself:\n{log.read_text()[-3000:]}")
        try:
            with urllib.request.urlopen(f"{stack.console}/healthz", timeout=5) as answer:
                if json.load(answer)["status"] == "ok":
                    return
            time.sleep(0.5)
        except (urllib.error.URLError, OSError):
            time.sleep(0.5)
    raise RuntimeError(f"not ready after {READY_S:.0f} s:\n{log.read_text()[-3000:]}")
