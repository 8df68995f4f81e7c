"""The whole of `make up` as processes in a folder and on ports of its own, and a Chromium to look at it with."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import requests
from playwright.sync_api import Browser, Playwright

from workers.supervisor.ports import free_port

ROOT = Path(__file__).resolve().parents[3]
# The headless shell is the same Chromium without a window around each page, which costs more than many pages.
CHROMIUMS = (Path("/usr/bin/chromium-headless-shell"), Path("/usr/bin/chromium"))
FLAGS = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking"]
READY_S = 180.0
STOP_S = 60.0
# Requests/s. The bursts of the demo's own load would start engines that no test needs.
CALM = ("--low", "1", "--high", "2", "--burst", "2")
SENDERS = 256  # requests on their way at once
ANSWER_S = 120.0  # of the gateway, the longest


class Stack:
    """A running Slackline. `people` maps a role to user name and password."""

    def __init__(self, folder: Path, gateway_port: int, console_port: int) -> None:
        self.folder = folder
        self.console = f"http://127.0.0.1:{console_port}"
        self.gateway = f"http://127.0.0.1:{gateway_port}"
        self._senders = ThreadPoolExecutor(SENDERS)

    @property
    def credentials(self) -> dict[str, Any]:
        known: dict[str, Any] = json.loads((self.folder / "credentials.json").read_text())
        return known

    def person(self, role: str) -> tuple[str, str]:
        return self.credentials[role], self.credentials[f"{role}_password"]

    def pid(self, name: str) -> int:
        running = json.loads((self.folder / "processes.json").read_text())
        return next(int(each["pid"]) for each in running if each["name"] == name)

    def ask(self, body: dict[str, Any], key: str = "", stream: bool = False) -> requests.Response:
        """One request to the gateway and its answer, by the demo tenant or by whoever has `key`."""
        head = {"Authorization": f"Bearer {key or self.credentials['api_key']}"}
        url = f"{self.gateway}/v1/completions"
        return requests.post(url, json=body, headers=head, stream=stream, timeout=ANSWER_S)

    def send(self, count: int, **body: Any) -> list[Future[int]]:
        """Requests in parallel, not waited for; each answers its HTTP status."""
        whole = {"model": self.credentials["model"], "prompt": "Tell me about queues. " * 40, "max_tokens": 200, **body}
        return [self._senders.submit(lambda: self.ask(whole).status_code) for _ in range(count)]

    def close(self) -> None:
        self._senders.shutdown(wait=True, cancel_futures=True)


@contextmanager
def running(demo_load: bool = False) -> Iterator[Stack]:
    """Starts everything, waits until it is ready, stops it and leaves nothing behind. `demo_load`: of `make up`, or
    else one to two requests a second."""
    folder = Path(tempfile.mkdtemp(prefix="slackline-browser-"))
    folder.chmod(0o755)  # PostgreSQL may have to run as another user below it
    gateway_port, console_port = free_port(), free_port()
    env = {**os.environ, "DATA_DIR": str(folder), "DEMO_LOAD": str(int(demo_load))}
    for name in ("DATABASE_URL", "REDIS_URL", "SLACKLINE_ROLE", "SECRET_KEY", "DJANGO_SETTINGS_MODULE"):
        env.pop(name, None)  # those of the test run are not ours
    env |= {"GATEWAY_PORT": str(gateway_port), "CONSOLE_PORT": str(console_port)}
    log = folder / "up.log"
    with log.open("w") as output:
        command = [sys.executable, "-m", "workers.supervisor", "up"]
        process = subprocess.Popen(command, cwd=ROOT, env=env, stdout=output, stderr=subprocess.STDOUT)
    stack = Stack(folder, gateway_port, console_port)
    try:
        wait_ready(stack, process, log)
        with nullcontext() if demo_load else calm_load(stack, env):
            yield stack
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(STOP_S)
        finally:
            process.kill()
            stack.close()
            shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def calm_load(stack: Stack, env: Mapping[str, str]) -> Iterator[None]:
    command = [sys.executable, "-m", "workers.demo_load", "--url", stack.gateway, *CALM]
    with (stack.folder / "logs" / "demo-load.log").open("a") as output:
        process = subprocess.Popen(command, cwd=ROOT, env=env, stdout=output, stderr=output)
    try:
        yield
    finally:
        process.terminate()
        process.wait(STOP_S)


def wait_ready(stack: Stack, process: subprocess.Popen[bytes], log: Path) -> None:
    give_up_at = time.monotonic() + READY_S
    while time.monotonic() < give_up_at:
        if process.poll() is not None:
            raise RuntimeError(f"the stack ended by itself:\n{log.read_text()[-3000:]}")
        try:
            if requests.get(f"{stack.console}/healthz", timeout=5).json()["status"] == "ok":
                return
        except requests.RequestException:
            time.sleep(0.2)
        time.sleep(0.3)
    raise RuntimeError(f"not ready after {READY_S:.0f} s:\n{log.read_text()[-3000:]}")


def chromium(playwright: Playwright) -> Browser:
    """A fresh one; without Chromium this is an error that says what to install, never a skip."""
    path = next((each for each in CHROMIUMS if each.exists()), None)
    if path is None:
        raise RuntimeError("Chromium is missing: apt-get install --no-install-recommends chromium-headless-shell")
    return playwright.chromium.launch(executable_path=str(path), args=FLAGS, timeout=90_000)
