"""A worker ended by `kill -9` while real weights move from one real engine to another."""

import os
import signal
from collections.abc import Sequence

import pytest
import requests

from controller.models import Action, Decision, Instance, Transfer
from controller.services.actors import SYSTEM
from controller.services.fleet.actions import weights_load_order
from tests import factories
from tests.waiting import until
from tests.workers.actions.test_action_worker import said
from tests.workers.engine.torch.bench import folder

pytestmark = [pytest.mark.torch, pytest.mark.db, pytest.mark.django_db(transaction=True), pytest.mark.long(20)]

LARGE = ("LlamaForCausalLM", "--hidden", "1024", "--layers", "6")  # some 0.2 s of transfer
ASK = {"model": "m", "prompt": list(range(40)), "max_tokens": 8, "ignore_eos": True, "temperature": 0}


@pytest.fixture(scope="module")
def engine_options() -> dict[str, Sequence[str]]:
    """One that serves and one that is warm."""
    options = ("--executor", "torch", "--threads", "1", "--kv-cache-gib", "0.01", "--profile", "constant:5ms")
    named = ("--model", str(folder(*LARGE)), "--served-model-name", "m", "--shutdown-timeout", "0")
    return {"source": (*options, *named), "warm": (*options, *named, "--weights", "absent")}


def text(engine):
    answer = requests.post(f"{engine.url}/v1/completions", json=ASK, timeout=60)
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"][0]["text"]


def test_the_engine_loads_on_and_the_next_worker_finds_what_became_of_it(engines, worker):
    source, warm = engines["source"], engines["warm"]
    model = factories.served_model()
    factories.instance(id="source", model=model, url=source.url)
    row = factories.instance(id="warm", model=model, url=warm.url, weights="absent")
    action = weights_load_order(actor=SYSTEM, instance_id=row.pk)
    first = worker()
    until(lambda: said(warm)["state"] == "loading", every_s=0.005)
    os.kill(source.process.pid, signal.SIGSTOP)  # the transfer stands still: what follows is in its middle
    try:
        assert said(warm)["state"] == "loading"
        first.send_signal(signal.SIGKILL)
        assert first.wait() == -signal.SIGKILL
        assert said(warm)["state"] == "loading"
        assert not Decision.objects.filter(kind__startswith="weights_load").exists()
    finally:
        os.kill(source.process.pid, signal.SIGCONT)
    until(lambda: said(warm)["state"] == "present")  # nobody looks
    action.refresh_from_db()
    assert (action.state, Instance.objects.get(pk=row.pk).weights) == ("running", "loading")
    worker()
    until(lambda: Decision.objects.filter(kind="weights_load").exists())
    action.refresh_from_db()
    assert (action.state, action.tries, said(warm)["order"]) == ("done", 1, f"action-{action.pk}-1")
    (attempt,) = action.attempts
    assert (attempt["kind"], attempt["source"], attempt["error"]) == ("engine", "source", "")
    assert attempt["bytes"] == said(warm)["bytes"] > 100e6
    assert Transfer.objects.filter(action=action).count() == 1
    assert Instance.objects.get(pk=row.pk).weights == "present"
    assert Action.objects.count() == 1
    assert text(warm) == text(source)
