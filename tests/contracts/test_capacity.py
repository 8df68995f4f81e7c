"""The service and the simulator make the same capacity plan of the same fleet.

A simulation runs with its scalers; each plan that it makes is kept with the fleet it was made for. The same fleet is
then written to the database, and one tick of the service has to plan the same steps for the same reason.
"""

import time
from dataclasses import replace
from datetime import UTC, datetime
from typing import NamedTuple

import pytest
from django.db import transaction

from controller.models import Action, Decision, Instance, ScalerState
from controller.scale import ScalingConfig
from controller.scale.capacity_plan import (
    CapacityPlan,
    LoadWeights,
    PutToSleep,
    StageCapacity,
    StartNew,
    WakeUp,
    plan_capacity,
)
from controller.scale.role_changes import SwitchRole
from controller.scale.scaler import Drain, Undrain
from controller.services import scaling
from controller.services.actors import SYSTEM
from controller.services.instances import instance_create, instance_drain, instance_observe, instance_update
from controller.services.scaling_policies import scaling_policy_create
from controller.services.served_models import served_model_create
from controller.services.topology import device_create, host_create
from controller.simulator import ElasticSettings
from controller.simulator.fleet import elastic
from tests.controller.simulator.fleet.test_elastic import wave
from tests.controller.simulator.fleet.test_elastic_roles import D, P, rush
from tests.controller.simulator.runs import SMALL, simulate

pytestmark = [pytest.mark.db, pytest.mark.django_db]

LOAD = {"device": 0.9, "host": 2.7, "disk": 4.1}
CONFIG = ScalingConfig("model", min_instances=1, max_instances=6, sustain_s=2.0, cooldown_s=1.0)
PREFILL, DECODE = (replace(CONFIG, role=role) for role in ("prefill", "decode"))


class Planned(NamedTuple):
    stage: StageCapacity
    plan: CapacityPlan
    now: float


@pytest.fixture
def planned(monkeypatch):
    """All plans with steps that the simulator or the service makes, in order."""
    made = []

    def recording(stage, verdict, now):
        plan = plan_capacity(stage, verdict, now)
        if plan.steps:
            made.append(Planned(stage, plan, now))
        return plan

    monkeypatch.setattr(elastic, "plan_capacity", recording)
    monkeypatch.setattr(scaling, "plan_capacity", recording)
    return made


def asleep(instance, level):
    return replace(instance, sleep_level=level)


def collocated(sleep_level):
    """A rush, two sleepers and a warm spare; then calm."""
    instances = (SMALL, asleep(SMALL, 2), asleep(SMALL, 1))
    settings = ElasticSettings(CONFIG, "device", LOAD, start_s=8.0, warm=1, sleep_level=sleep_level)
    return simulate(wave(), "slackline", instances, elastic=settings)


def disaggregated(*instances, most=None):
    settings = ElasticSettings(PREFILL, "device", LOAD, DECODE, most=most, start_s=8.0)
    return simulate(rush(900, 2, count=400), "slackline", instances, elastic=settings)


RUNS = {
    "collocated, stopped when not needed": (lambda: collocated(0), {WakeUp, LoadWeights, StartNew, Drain}),
    "collocated, put to sleep when not needed": (lambda: collocated(1), {WakeUp, LoadWeights, StartNew, PutToSleep}),
    "the other stage gives": (lambda: disaggregated(P, D, D, D, most=4), {SwitchRole}),
    "each stage has a sleeper": (lambda: disaggregated(P, D, asleep(P, 1), asleep(D, 1)), {WakeUp, StartNew}),
}


@pytest.mark.parametrize("name", RUNS)
def test_the_service_plans_what_the_simulator_plans(name, planned):
    run, kinds = RUNS[name]
    told = {decision.at: decision for decision in run().decisions if decision.kind in ("scale_out", "scale_in")}
    simulated = list(planned)
    assert {type(step) for each in simulated for step in each.plan.steps} >= kinds
    for each in simulated:
        planned.clear()
        with transaction.atomic():
            decision = _tick_of_the_service(each)
            transaction.set_rollback(True)
        assert [again.plan.steps for again in planned] == [each.plan.steps]
        expected = next(d for at, d in told.items() if at == each.now)
        if len([d for d in simulated if d.now == each.now]) == 1:
            assert (decision.kind, decision.reason) == (expected.kind, expected.reason)


def _tick_of_the_service(planned):
    """The fleet of the plan in the database, and the tick that sees it."""
    stage, now = planned.stage, time.time()
    model = served_model_create(actor=SYSTEM, name=stage.config.model)
    policy = _policy(model, stage.config, sleep_level=stage.sleep_level)
    low = {"low_since": now - stage.config.sustain_s - 1, "seen_at": now - 0.5}
    ScalerState.objects.create(policy=policy, state=low)
    _instances(model, stage.config.role, stage.seen)
    for spare in stage.spares:
        _spare(model, stage.config.role, spare, now - planned.now)
    looks = {stage.config.role: stage.seen}
    if stage.other is not None:
        config, seen, since = stage.other
        since = None if since is None else since - planned.now + now
        ScalerState.objects.create(policy=_policy(model, config), state={"spare_since": since})
        _instances(model, config.role, seen)
        looks[config.role] = seen
    if stage.room is not None:
        _machine(Instance.objects.count() + stage.room)
    ScalerState.objects.update(updated_at=datetime.fromtimestamp(now - 60, tz=UTC))
    decision = scaling.scaler_tick(policy_id=policy.pk, fleet=[_message(now, stage.config.model, looks)], now=now)
    _carried_out(planned.plan, decision)
    return decision


def _policy(model, config, **other):
    names = ("role", "min_instances", "max_instances", "upper", "lower", "sustain_s", "cooldown_s", "interval_s")
    return scaling_policy_create(
        actor=SYSTEM, model=model, warm=0, **{name: getattr(config, name) for name in names}, **other
    )


def _instances(model, role, seen):
    for member in seen.members:
        _instance(model, role, member.id, "starting" if member.state == "starting" else "ready")
        if member.state == "draining":
            instance_drain(actor=SYSTEM, instance_id=member.id)


def _instance(model, role, id, observed):
    instance_create(actor=SYSTEM, id=id, model=model, role=role, spec={"profile": "constant:5ms"})
    instance_observe(instance_id=id, observed_state=observed, url=f"http://{id}:1")


def _spare(model, role, spare, offset):
    _instance(model, role, spare.id, "ready" if spare.ready else "starting")
    Instance.objects.filter(pk=spare.id).update(
        weights="asleep" if spare.sleep_level else "absent",
        sleep_level=spare.sleep_level,
        desired_at=datetime.fromtimestamp(spare.since + offset, tz=UTC),
    )


def _machine(devices):
    """A host with so many devices, on which all instances run."""
    host = host_create(actor=SYSTEM, name="box")
    for index in range(devices):
        device_create(actor=SYSTEM, host=host, index=index, kind="a100", memory_bytes=1 << 30)
    for row in Instance.objects.all():
        instance_update(actor=SYSTEM, instance_id=row.pk, version=row.version, changes={"host": host})


def _message(now, model, looks):
    """What a gateway would publish of it. The load is told as a wait, so that no rate has to be guessed."""
    instances = [
        {"id": member.id, "utilisation": member.utilisation, "running": member.outstanding, "waiting": 0}
        for seen in looks.values()
        for member in seen.members
    ]
    stages = {
        role: {"arrival_rate": 0.0, "service_rate": 0.0, "queued": seen.queued, "wait_over_slo": min(seen.load, 1e6)}
        for role, seen in looks.items()
    }
    traffic = {**next(iter(stages.values())), "migrating": 0, "migrate_wait_over_slo": 0.0, "stages": stages}
    return {"at": now - 0.1, "period_s": 1.0, "instances": instances, "models": {model: traffic}}


def _carried_out(plan, decision):
    """The service did what its plan says, and recorded it."""
    woken = {step.instance_id for step in plan.steps if isinstance(step, WakeUp)}
    loading = {step.instance_id for step in plan.steps if isinstance(step, LoadWeights)}
    asleep = {step.instance_id for step in plan.steps if isinstance(step, PutToSleep)}
    assert set(Instance.objects.filter(weights="loading").values_list("pk", flat=True)) == woken | loading
    assert set(Instance.objects.filter(weights="leaving").values_list("pk", flat=True)) == asleep
    assert set(decision.outcome.get("woken", {})) == woken
    assert set(decision.outcome.get("warm", {})) == loading
    assert set(decision.outcome.get("asleep", [])) == asleep
    assert len(decision.outcome.get("started", [])) == len(woken | loading) + plan.new
    assert Action.objects.filter(kind="first_served").count() == len(woken | loading) + plan.new
    for step in plan.steps:
        if isinstance(step, SwitchRole):
            assert Instance.objects.get(pk=step.instance_id).role == step.role
            assert Decision.objects.filter(kind="role_change").count() == 1
        elif isinstance(step, Drain | Undrain):
            desired = "draining" if isinstance(step, Drain) else "running"
            assert Instance.objects.get(pk=step.instance_id).desired_state == desired
