"""Endpoints that somebody else runs and that sleep by their row: what is believed of one that says it is awake."""

import time
from pathlib import Path

import pytest
import requests
from django.utils import timezone

from controller.models import Decision, Instance
from controller.scale.lifecycle import FoundAwake
from controller.selectors.snapshot import gateway_snapshot
from controller.services.fleet import lifecycle
from tests.workers.sleep_orders import answer, put_to_sleep
from workers.actions.parallel_calls import LoopCalls
from workers.http.kept_calls import KeptAnswer
from workers.provisioners import Watch, static
from workers.tasks import reconcile
from workers.tasks.reconcile import reconcile_once

pytestmark = [pytest.mark.db, pytest.mark.django_db, pytest.mark.usefixtures("patient", "no_settling")]


@pytest.fixture
def look(monkeypatch):
    """One look of the reconciler at registered endpoints, over their sockets."""
    monkeypatch.setattr(static, "WATCH", Watch(LoopCalls(patience_s=60.0)))
    monkeypatch.setattr(reconcile, "fleet_or_nothing", list)
    for name in ("ASK_S", "HEALTH_TIMEOUT_S"):
        monkeypatch.setattr(static, name, 60.0)
    return lambda: reconcile_once(reconcile.provisioners(Path("/nowhere")), time.time())


def found():
    return list(Decision.objects.filter(kind="instance_awake").values_list("reason", flat=True))


def state(name="v1"):
    row = Instance.objects.get(pk=name)
    served = name in {spec.id for spec in gateway_snapshot().instances}
    return row.weights, row.sleep_level, served


def was_away(name="v1"):
    """The look before this one saw nobody there."""
    Instance.objects.filter(pk=name).update(observed_state="unreachable")


@pytest.mark.parametrize("level", [1, 2])
def test_one_that_sleeps_sleeps_on(vllm, row, look, level):
    put_to_sleep(row, level)
    was_away()
    for _ in range(2):
        look()
        assert (state(), found()) == (("asleep", level, False), [])


@pytest.mark.parametrize("level", [1, 2])
def test_one_that_was_started_again_serves_again(vllm, row, look, level):
    put_to_sleep(row, level)
    vllm.restart()
    was_away()
    look()
    assert state() == ("present", 0, True)
    decision = Decision.objects.get(kind="instance_awake")
    assert (decision.reason, decision.actor, decision.inputs) == ("found_awake", "reconciler", {"level": level})
    look()
    assert found() == ["found_awake"]


def test_one_that_somebody_woke_from_its_copy_serves_again(vllm, row, look):
    put_to_sleep(row, 1)
    requests.post(f"{vllm.url}/wake_up", timeout=60)
    look()
    assert (state(), answer(vllm)) == (("present", 0, True), "good")


def test_one_that_somebody_woke_without_its_weights_is_sent_nothing(vllm, row, look):
    put_to_sleep(row, 2)
    requests.post(f"{vllm.url}/wake_up", timeout=60)
    look()
    assert (state(), answer(vllm), found()) == (("asleep", 2, False), "garbage", [])


def test_one_whose_metrics_cannot_be_read_sleeps_on(vllm, row, look):
    put_to_sleep(row, 1)
    vllm.restart()
    vllm.away = True
    look()
    assert state() == ("asleep", 1, False)


def test_what_was_seen_before_it_fell_asleep_again_says_nothing(vllm, row):
    slept = put_to_sleep(row, 1)
    step = FoundAwake("v1", slept.version)
    Instance.objects.update(version=slept.version + 2)
    assert lifecycle.instance_found_awake(step=step) is None
    assert state() == ("asleep", 1, False)


@pytest.mark.parametrize(
    ("ready", "away", "weights"), [(200, True, "present"), (200, False, "asleep"), (503, True, "asleep")]
)
def test_an_sglang_is_believed_when_it_was_away(row, look, monkeypatch, ready, away, weights):
    """Its owner may have continued one whose memory was released: it says that it is ready all the same."""
    slept = put_to_sleep(row, 1)
    Instance.objects.filter(pk=slept.pk).update(backend="sglang")
    asked = []

    async def get(url, **_):
        asked.append(url.removeprefix(slept.url))
        return KeptAnswer(ready if url.endswith("/ready") else 200, {}, b'{"disaggregation_mode": "null"}')

    monkeypatch.setattr(static.kept_calls, "get", get)
    Instance.objects.update(ready_at=timezone.now() if away else None)
    look()
    assert (asked, state()[0]) == (["/model_info", "/ready"], weights)


def test_one_that_is_not_asleep_is_not_asked(vllm, row, look, monkeypatch):
    async def ask(endpoint):
        raise AssertionError("its metrics cost it time")

    monkeypatch.setattr(static, "_awake", ask)
    look()
    assert state() == ("present", 0, True)
