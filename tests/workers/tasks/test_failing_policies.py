"""One scaling policy that raises: the others tick on, and /healthz names it until it works again."""

import json

import pytest
import redis
from django.conf import settings
from django.test import Client

from console.views.site import health
from controller.models import ScalerState
from controller.services.actors import SYSTEM
from controller.services.fleet.instances import instance_create, instance_observe
from controller.services.fleet.scaling_policies import scaling_policy_create
from controller.services.fleet.served_models import served_model_create
from workers.celery import app
from workers.tasks import scaling
from workers.tasks.names import SCALE

pytestmark = [pytest.mark.db, pytest.mark.django_db(transaction=True)]
UNREADABLE = {"seen_at": "yesterday"}  # no number: arithmetic with it raises TypeError


@pytest.fixture(autouse=True)
def _empty_redis(monkeypatch):
    redis.Redis.from_url(settings.REDIS_URL).flushdb()
    monkeypatch.setattr(settings, "GATEWAY_URL", "http://127.0.0.1:1")


def model_with_policy(name, role="collocated", state=None):
    model = served_model_create(actor=SYSTEM, name=name)
    return model, policy_of(model, role, state)


def policy_of(model, role, state=None):
    policy = scaling_policy_create(
        actor=SYSTEM, model=model, role=role, min_instances=1, max_instances=4, sustain_s=0, cooldown_s=0
    )
    if state is not None:
        break_state(policy, state)
    return policy


def break_state(policy, state):
    ScalerState.objects.update_or_create(policy=policy, defaults={"state": state})
    due(policy)


def due(policy):
    ScalerState.objects.filter(policy=policy).update(updated_at="2020-01-01T00:00:00Z")


def ticks(policy):
    return ScalerState.objects.filter(policy=policy).values_list("tick", flat=True).first() or 0


def jobs():
    health.RECENT = health.KeptState()  # not the state of a moment ago
    return Client().get("/healthz").json()["components"]["jobs"]


def run():
    result = app.tasks[SCALE].apply()
    assert result.successful(), result.result


def test_policies_after_one_that_raises_tick_and_health_names_it_until_it_works():
    _, broken = model_with_policy("broken", state=UNREADABLE)
    _, sound = model_with_policy("sound")
    for n in range(3):
        assert jobs() == {"state": "ok", "detail": ""}
        due(sound)
        run()
        assert ticks(sound) == n + 1
    assert ticks(broken) == 0
    told = "scaling policy broken/collocated failed 3 times in a row (TypeError)"
    assert jobs() == {"state": "down", "detail": told}
    break_state(broken, {})
    run()
    assert ticks(broken) == 1
    assert jobs() == {"state": "ok", "detail": ""}


def test_a_failing_policy_that_was_deleted_is_not_named_any_more():
    _, broken = model_with_policy("broken", state=UNREADABLE)
    for _ in range(3):
        run()
    assert jobs()["state"] == "down"
    broken.delete()
    run()
    assert jobs()["state"] == "ok"


def test_whatever_it_raises_and_wherever(monkeypatch):
    """After its commit too: a decision that cannot be told."""
    _, first = model_with_policy("first")
    _, second = model_with_policy("second")
    told = []

    def announce(decision):
        told.append(decision)
        raise KeyError("sentence")

    monkeypatch.setattr(scaling, "announce", announce)
    run()
    assert (ticks(first), ticks(second), len(told)) == (1, 1, 2)


def test_a_policy_whose_neighbour_stage_is_broken_still_scales_out(monkeypatch):
    """Looking at the other stage for an instance to turn raises there; that is not this policy's fault."""
    model, prefill = model_with_policy("mid", "prefill")
    decode = policy_of(model, "decode", UNREADABLE)
    instance_create(actor=SYSTEM, id="p1", model=model, role="prefill", spec={"profile": "constant:5ms"})
    instance_observe(instance_id="p1", observed_state="ready", url="http://p1:1")
    overload = {"id": "p1", "utilisation": 0.99, "running": 9, "waiting": 3}
    traffic = {"arrival_rate": 1.0, "service_rate": 1.0, "queued": 0, "wait_over_slo": 0.0}
    traffic |= {"migrating": 0, "migrate_wait_over_slo": 0.0}
    now = scaling.time.time()
    message = {"at": now, "period_s": 1.0, "instances": [overload], "models": {"mid": traffic}}
    monkeypatch.setattr(scaling, "read_fleet", lambda: [json.loads(json.dumps(message))])
    run()
    assert ticks(prefill) == 1
    assert ticks(decode) == 0
    assert model.instances.filter(role="prefill").count() == 2
