"""One tick of the scaler against a real database: what it writes, and that nothing is written twice."""

import time
from datetime import timedelta

import psycopg
import pytest
from django.db import connection
from django.utils import timezone

from controller.models import Decision, Instance, ScalerState
from controller.services.actors import SYSTEM
from controller.services.fleet.instances import instance_drain
from controller.services.fleet.scaling import scaler_tick
from controller.services.fleet.scaling_policies import LOCK_CLASS, scaling_policy_update

pytestmark = pytest.mark.django_db


def fleet(utilisation, *ids, age_s=0.2, now=None, **other):
    instances = [{"id": id, "utilisation": utilisation, "running": 1, "waiting": 0} for id in ids]
    traffic = {"arrival_rate": 0.0, "service_rate": 0.0, "queued": 0, "wait_over_slo": 0.0}
    traffic |= {"migrating": 0, "migrate_wait_over_slo": 0.0, **other}
    message = {"at": (now or time.time()) - age_s, "period_s": 1.0, "instances": instances}
    return [{**message, "models": {"mid": traffic}}]


def tick(policy, messages):
    """As if the last tick was an interval ago."""
    ScalerState.objects.filter(policy=policy).update(updated_at=timezone.now() - timedelta(seconds=5))
    return scaler_tick(policy_id=policy.pk, fleet=messages, now=time.time())


def test_overload_starts_an_instance_like_the_others(policy, two):
    decision = tick(policy, fleet(0.95, *two))
    assert (decision.kind, decision.reason, decision.actor) == ("scale_out", "load_above_upper", "scaler")
    assert decision.inputs["utilisation"] == 0.95
    new = Instance.objects.get(pk=decision.outcome["started"][0])
    assert (new.desired_state, new.observed_state, new.spec["profile"]) == ("running", "pending", "constant:5ms")


def test_low_load_drains_the_one_with_least_to_do(policy, two):
    messages = fleet(0.05, *two)
    messages[0]["instances"][0]["running"] = 7
    decision = tick(policy, messages)
    assert (decision.kind, decision.inputs["instance"]) == ("scale_in", "e2")
    assert Instance.objects.get(pk="e2").desired_state == "draining"


def test_a_drain_is_taken_back_under_load(policy, two):
    instance_drain(actor=SYSTEM, instance_id="e2")
    assert tick(policy, fleet(0.95, *two)).inputs["instance"] == "e2"
    assert Instance.objects.get(pk="e2").desired_state == "running"


def test_stale_telemetry_changes_nothing_and_is_said_once(policy, two):
    assert tick(policy, fleet(0.99, *two, age_s=10)).reason == "telemetry_stale"
    assert tick(policy, []) is None
    assert Instance.objects.count() == 2


def test_a_steady_fleet_leaves_no_decision_but_remembers(policy, two):
    assert tick(policy, fleet(0.5, *two)) is None
    state = ScalerState.objects.get(policy=policy)
    assert (state.tick, state.state["load"]) == (1, 0.5)


def test_a_second_tick_within_the_interval_does_nothing(policy, two, monkeypatch):
    first = timezone.now()
    clock = [first]
    monkeypatch.setattr(timezone, "now", lambda: clock[0])

    def ticked():
        now = clock[0].timestamp()
        return scaler_tick(policy_id=policy.pk, fleet=fleet(0.95, *two, now=now), now=now)

    assert ticked() is not None
    clock[0] = first + timedelta(seconds=0.5 * policy.interval_s)
    assert ticked() is None
    assert (Instance.objects.count(), ScalerState.objects.get(policy=policy).tick) == (3, 1)
    clock[0] = first + timedelta(seconds=policy.interval_s)
    ticked()
    assert ScalerState.objects.get(policy=policy).tick == 2


def test_while_another_worker_ticks_nothing_happens(policy, two):
    info = connection.get_connection_params()
    with psycopg.connect(
        host=info["host"], port=info["port"], user=info["user"], dbname=info["dbname"], autocommit=True
    ) as other:
        other.execute("SELECT pg_advisory_lock(%s, %s)", [LOCK_CLASS, policy.pk])
        assert tick(policy, fleet(0.95, *two)) is None
        other.execute("SELECT pg_advisory_unlock(%s, %s)", [LOCK_CLASS, policy.pk])  # a closed session's ends later
    assert Decision.objects.filter(kind="scale_out").count() == 0
    assert tick(policy, fleet(0.95, *two)) is not None


def test_a_tick_replayed_over_an_old_state_is_not_applied_again(policy, two):
    """A worker killed after its commit, and a state restored from before: the tick number is the key."""
    tick(policy, fleet(0.95, *two))
    ScalerState.objects.filter(policy=policy).update(state={}, tick=0)
    assert tick(policy, fleet(0.95, *two)) is None
    assert Instance.objects.count() == 3
    assert Decision.objects.filter(kind="scale_out").count() == 1


def test_a_disabled_policy_does_not_tick(policy, two):
    scaling_policy_update(actor=SYSTEM, policy_id=policy.pk, version=policy.version, changes={"enabled": False})
    assert tick(policy, fleet(0.95, *two)) is None
    assert not ScalerState.objects.filter(policy=policy).exists()


def test_a_fleet_of_others_endpoints_cannot_grow(policy, two):
    Instance.objects.update(provisioner="static")
    assert tick(policy, fleet(0.95, *two)).reason == "nothing_to_start"
    assert tick(policy, fleet(0.01, *two)).reason == "relieved"
    assert Instance.objects.filter(desired_state="running").count() == 2
