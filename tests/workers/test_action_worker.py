"""A real engine that loads for seconds and real workers, one of them ended by `kill -9` in the middle."""

import os
import signal
import subprocess
import sys
import time

import pytest
import requests
from django.conf import settings
from django.db import connection

from controller.models import Action, Decision, Instance
from controller.services.actions import weights_load_order
from controller.services.actors import SYSTEM
from tests import factories
from tests.workers.engine.process import EngineProcess
from workers.supervisor.plan import ROOT

pytestmark = [pytest.mark.db, pytest.mark.slow, pytest.mark.django_db(transaction=True)]

TOKEN = "fleet-secret"
LOAD_S = 4.0
WORKER = """
import time, django
django.setup()
from workers.actions import look
print("ready", flush=True)
while True:
    look([])
    time.sleep(0.2)
"""


@pytest.fixture
def engine(monkeypatch):
    monkeypatch.setenv("FLEET_TOKEN", TOKEN)
    loads = f"engine={LOAD_S},host={LOAD_S},disk={LOAD_S}"
    with EngineProcess(
        *("--profile", "constant:2ms", "--model", "tiny", "--weights", "absent", "--emulated-load-s", loads)
    ) as process:
        yield process


@pytest.fixture
def worker():
    """Starts one; those that still run at the end are ended."""
    info = connection.get_connection_params()
    url = f"postgresql://{info['user']}@{info['host']}:{info['port']}/{info['dbname']}"
    told = {"DATABASE_URL": url, "REDIS_URL": settings.REDIS_URL, "DATA_DIR": str(settings.DATA_DIR)}
    told |= {"DJANGO_SETTINGS_MODULE": "console.settings", "SLACKLINE_ROLE": "worker", "FLEET_TOKEN": TOKEN}
    started = []

    def start():
        process = subprocess.Popen(
            [sys.executable, "-c", WORKER], env={**os.environ, **told}, cwd=ROOT, stdout=subprocess.PIPE
        )
        started.append(process)
        assert process.stdout.readline().strip() == b"ready"
        return process

    yield start
    for process in started:
        process.kill()
        process.wait()
        process.stdout.close()


def until(condition, within_s=30.0):
    ends_at = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < ends_at, "too late"
        time.sleep(0.1)


def said(engine):
    return requests.get(f"{engine.url}/weights", timeout=5).json()


def test_a_worker_killed_in_the_middle_of_a_load(engine, worker):
    row = factories.instance(url=engine.url, weights="absent")
    action = weights_load_order(actor=SYSTEM, instance_id=row.pk)
    first = worker()
    until(lambda: said(engine)["state"] == "loading")
    first.send_signal(signal.SIGKILL)
    assert first.wait() == -signal.SIGKILL
    assert said(engine)["state"] == "loading"
    worker()
    until(lambda: Decision.objects.filter(kind="weights_load").exists())
    action.refresh_from_db()
    assert (action.state, action.tries, said(engine)["order"]) == ("done", 1, f"action-{action.pk}-1")
    (attempt,) = action.attempts
    assert (attempt["kind"], attempt["error"]) == ("disk", "")
    assert LOAD_S - 0.1 < attempt["seconds"] < LOAD_S + 1
    assert Instance.objects.get(pk=row.pk).weights == "present"
    time.sleep(1.0)
    assert Decision.objects.filter(kind__startswith="weights_load").count() == 1
    assert Action.objects.count() == 1
    answer = requests.post(f"{engine.url}/v1/completions", json={"prompt": "x", "max_tokens": 1}, timeout=5)
    assert answer.status_code == 200


def test_an_engine_that_wants_another_token_refuses(engine, worker, settings):
    row = factories.instance(url=engine.url, weights="absent")
    action = weights_load_order(actor=SYSTEM, instance_id=row.pk)
    settings.FLEET_TOKEN = "another"
    from workers.actions import look

    (decision,) = look([])
    assert (decision.kind, decision.reason) == ("weights_load_failed", "engine_refused")
    assert "token" in decision.outcome["error"]
    action.refresh_from_db()
    assert (action.state, Instance.objects.get(pk=row.pk).weights) == ("failed", "absent")
