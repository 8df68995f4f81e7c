from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator

import pytest
from django.conf import settings
from django.db import connection

from controller.models import Decision, Instance
from tests import factories
from tests.workers.engine.process import FLEET
from tests.workers.scripted_engine import Engine
from tests.workers.sleeping_vllm import SleepingVllm
from workers.actions import instance_links as links
from workers.actions import runner as actions
from workers.actions import sleep_client, sleeping
from workers.actions.parallel_calls import ThreadCalls
from workers.supervisor.plan import ROOT

WORKER = """
import time, django
django.setup()
from workers.actions.runner import advance_actions
print("ready", flush=True)
while True:
    began = time.time()
    advance_actions([])
    print(began, flush=True)
    time.sleep(0.2)
"""


@pytest.fixture
def path() -> Iterator[str]:
    """Of a transfer daemon's Unix socket, whose path may not be long."""
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        yield f"{folder}/flowd.sock"


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Looks at engines wait for every answer, however slow the test's machine."""
    for module in (actions, links):
        monkeypatch.setattr(module, "PARALLEL", ThreadCalls(patience_s=60.0))
        monkeypatch.setattr(module, "ASK_S", 60.0)
    monkeypatch.setattr(actions, "BUDGET_S", 60.0)
    monkeypatch.setattr(links, "ANNOUNCER", ThreadCalls(patience_s=60.0))
    monkeypatch.setattr(links, "KNOWN", {})
    monkeypatch.setattr(links, "ASKED", {})


@pytest.fixture
def no_settling(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gateways have heard of a sleep at once, and an engine that did nothing is told again at once."""
    monkeypatch.setattr(sleeping, "SETTLE_S", 0.0)
    monkeypatch.setattr(sleeping, "ANSWER_S", 0.0)
    for module, name in ((sleeping, "LOOK_S"), (sleep_client, "CALL_S")):  # however slow the test's machine
        monkeypatch.setattr(module, name, 60.0)


@pytest.fixture
def vllm() -> Iterator[SleepingVllm]:
    with SleepingVllm() as fake:
        yield fake


@pytest.fixture
def row(vllm: SleepingVllm) -> Instance:
    """That vLLM as the fleet knows it."""
    return factories.instance(id="v1", backend="vllm", provisioner="static", url=vllm.url)


@pytest.fixture
def worker() -> Iterator[Callable[[], subprocess.Popen[bytes]]]:
    """Starts a real process that looks at actions as a worker does and prints when each look began (epoch seconds);
    those that still run at the end are ended."""
    info = connection.get_connection_params()
    url = f"postgresql://{info['user']}@{info['host']}:{info['port']}/{info['dbname']}"
    told = {"DATABASE_URL": url, "REDIS_URL": settings.REDIS_URL, "DATA_DIR": str(settings.DATA_DIR)}
    told |= {"DJANGO_SETTINGS_MODULE": "console.settings", "SLACKLINE_ROLE": "worker", "FLEET_TOKEN": FLEET["token"]}
    started: list[subprocess.Popen[bytes]] = []

    def start() -> subprocess.Popen[bytes]:
        process = subprocess.Popen(
            [sys.executable, "-c", WORKER], env={**os.environ, **told}, cwd=ROOT, stdout=subprocess.PIPE
        )
        started.append(process)
        assert process.stdout is not None
        assert process.stdout.readline().strip() == b"ready"
        return process

    yield start
    for process in started:
        process.kill()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()


@pytest.fixture
def engine() -> Engine:
    return Engine()


@pytest.fixture
def look_once(engine: Engine) -> Callable[[], list[Decision]]:
    return lambda: actions.advance_actions([], client=lambda url: engine)


@pytest.fixture
def holder() -> Instance:
    return factories.instance(id="holder")


@pytest.fixture
def warm(holder: Instance) -> Instance:
    return factories.instance(holder.model, id="warm", weights="absent")
