"""A real engine that loads for seconds and real workers, one of them ended by `kill -9` in the middle."""

import signal
import time

import pytest
import requests

from controller.models import Action, Decision, Instance
from controller.services.actors import SYSTEM
from controller.services.fleet.actions import weights_load_order
from tests import factories
from tests.waiting import until
from tests.workers.engine.process import EngineProcess

pytestmark = [pytest.mark.db, pytest.mark.slow, pytest.mark.django_db(transaction=True)]

LOAD_S = 4.0


@pytest.fixture
def engine(fleet_token):
    loads = f"engine={LOAD_S},host={LOAD_S},disk={LOAD_S}"
    with EngineProcess(
        *("--profile", "constant:2ms", "--model", "tiny", "--weights", "absent", "--emulated-load-s", loads)
    ) as process:
        yield process


def said(engine):
    return requests.get(f"{engine.url}/weights", timeout=5).json()


def looks_again(worker, times=3):
    """Return after so many whole looks that begin from now on."""
    now = time.time()
    while times:
        times -= float(worker.stdout.readline()) > now


def test_a_worker_killed_in_the_middle_of_a_load(engine, worker):
    row = factories.instance(url=engine.url, weights="absent")
    action = weights_load_order(actor=SYSTEM, instance_id=row.pk)
    first = worker()
    until(lambda: said(engine)["state"] == "loading")
    first.send_signal(signal.SIGKILL)
    assert first.wait() == -signal.SIGKILL
    assert said(engine)["state"] == "loading"
    second = worker()
    until(lambda: Decision.objects.filter(kind="weights_load").exists())
    action.refresh_from_db()
    assert (action.state, action.tries, said(engine)["order"]) == ("done", 1, f"action-{action.pk}-1")
    (attempt,) = action.attempts
    assert (attempt["kind"], attempt["error"]) == ("disk", "")
    assert LOAD_S - 0.1 < attempt["seconds"] < LOAD_S + 1
    assert Instance.objects.get(pk=row.pk).weights == "present"
    looks_again(second)
    assert Decision.objects.filter(kind__startswith="weights_load").count() == 1
    assert Action.objects.count() == 1
    answer = requests.post(f"{engine.url}/v1/completions", json={"prompt": "x", "max_tokens": 1}, timeout=5)
    assert answer.status_code == 200


def test_an_engine_that_wants_another_token_refuses(engine, worker, settings):
    row = factories.instance(url=engine.url, weights="absent")
    action = weights_load_order(actor=SYSTEM, instance_id=row.pk)
    settings.FLEET_TOKEN = "another"
    from workers.actions.runner import advance_actions

    (decision,) = advance_actions([])
    assert (decision.kind, decision.reason) == ("weights_load_failed", "engine_refused")
    assert "token" in decision.outcome["error"]
    action.refresh_from_db()
    assert (action.state, Instance.objects.get(pk=row.pk).weights) == ("failed", "absent")
