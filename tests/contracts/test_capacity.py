"""The service and the simulator decide alike about the same fleet.

A simulation runs with its scalers. Each of their ticks is kept: the fleet that it saw, the scaler's memory before and
after, the Decision, and the plan. The same fleet and memory are then written to the database, and one tick of the
service has to record the same kind and reason (also where it holds), plan the same steps, and leave the same memory to
both stages. After a role switch, the service ticks on with the memory that it stored itself.
"""

import time
from dataclasses import dataclass, replace
from datetime import UTC, datetime

import pytest
from django.db import transaction

from controller.core.decisions import Decision as Decided
from controller.models import Action, Decision, Instance, LaunchTemplate, ScalerState
from controller.scale import Scaler, ScalerMemory, ScalingConfig
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
from controller.services.actors import SYSTEM
from controller.services.fleet import scaling, scaling_stages
from controller.services.fleet.instances import instance_create, instance_drain, instance_observe, instance_update
from controller.services.fleet.launch_templates import shipped_templates_store
from controller.services.fleet.role_switches import role_order
from controller.services.fleet.scaling_policies import scaling_policy_create
from controller.services.fleet.served_models import served_model_create
from controller.services.fleet.topology import device_create, host_create
from controller.simulator import Demand, ElasticSettings
from controller.simulator.fleet import elastic
from tests.controller.simulator.fleet.test_elastic import wave
from tests.controller.simulator.fleet.test_elastic_roles import D, P, rush
from tests.controller.simulator.fleet.test_sole_keepers import FAST, SLOW, loose, tight
from tests.controller.simulator.fleet.test_sole_keepers import run as fast_and_slow
from tests.controller.simulator.runs import PATIENT, SMALL, simulate

pytestmark = [pytest.mark.db, pytest.mark.django_db]

FRESH, NOTHING = ScalerMemory(), CapacityPlan()
LOAD = {"device": 0.9, "host": 2.7, "disk": 4.1}
CONFIG = ScalingConfig("model", min_instances=1, max_instances=6, sustain_s=2.0, cooldown_s=1.0)
PREFILL, DECODE = (replace(CONFIG, role=role) for role in ("prefill", "decode"))


@dataclass
class Tick:
    """One tick of one stage's scaler, in the simulator or in the service."""

    stage: StageCapacity
    now: float
    before: ScalerMemory = FRESH
    after: ScalerMemory = FRESH
    decision: Decided | None = None
    plan: CapacityPlan = NOTHING

    @property
    def said(self):
        return (self.decision.kind, self.decision.reason) if self.decision else None

    @property
    def switched(self):
        return {step.instance_id for step in self.plan.steps if isinstance(step, SwitchRole)}


@pytest.fixture
def ticks(monkeypatch):
    """All ticks of the simulator or the service, in order."""
    made = []
    observation, decide = StageCapacity.observation, Scaler.decide

    def observed(stage, now):
        made.append(Tick(stage, now))
        return observation(stage, now)

    def decided(scaler, config, state, seen, now):
        answer = decide(scaler, config, state, seen, now)
        made[-1].before, (made[-1].after, _, made[-1].decision) = state, answer
        return answer

    def planned(stage, actions, now):
        made[-1].stage, made[-1].plan = stage, plan_capacity(stage, actions, now)
        return made[-1].plan

    monkeypatch.setattr(StageCapacity, "observation", observed)
    monkeypatch.setattr(Scaler, "decide", decided)
    monkeypatch.setattr(elastic, "plan_capacity", planned)
    monkeypatch.setattr(scaling, "plan_capacity", planned)
    return made


def asleep(instance, level):
    return replace(instance, sleep_level=level)


def collocated(sleep_level, most=None, start_s=8.0, **bounds):
    """A rush, two sleepers and a warm spare; then calm."""
    instances = (SMALL, asleep(SMALL, 2), asleep(SMALL, 1))
    config = replace(CONFIG, **bounds)
    settings = ElasticSettings(config, "device", LOAD, most=most, start_s=start_s, warm=1, sleep_level=sleep_level)
    return simulate(wave(), "slackline", instances, elastic=settings)


def disaggregated(*instances, policy="slackline", most=None, others=()):
    settings = ElasticSettings(PREFILL, "device", LOAD, DECODE, most=most, start_s=1.0)
    return simulate([*others, *rush(900, 2, count=400)], policy, instances, elastic=settings)


RUNS = {
    "collocated, stopped when not needed": (
        lambda: collocated(0),
        {WakeUp, LoadWeights, StartNew, Drain},
        {"at_max"},
    ),
    "collocated, quick starts": (lambda: collocated(0, start_s=1.0), {StartNew, Drain}, set()),
    "collocated, put to sleep when not needed": (
        lambda: collocated(1),
        {WakeUp, LoadWeights, StartNew, PutToSleep},
        {"at_max"},
    ),
    "collocated, a sleeper that requests need": (
        lambda: fast_and_slow([*loose(0, 80), *tight(60, 70)], (FAST, SLOW), sleep_level=1, wake_s=1.0),
        {WakeUp, PutToSleep},
        set(),
    ),
    "collocated, at its maximum": (lambda: collocated(0, max_instances=2), {WakeUp, Drain}, {"at_max"}),
    "collocated, no device free": (lambda: collocated(0, most=2), {WakeUp, Drain}, {"no_device"}),
    "the other stage gives": (lambda: disaggregated(P, D, D, D, most=4), {SwitchRole}, {"no_device"}),
    "each stage has a sleeper": (
        lambda: disaggregated(P, D, asleep(P, 1), asleep(D, 1)),
        {WakeUp, StartNew},
        {"settling"},
    ),
}


@pytest.mark.parametrize("name", RUNS)
def test_the_service_decides_what_the_simulator_decides(name, ticks):
    run, kinds, holds = RUNS[name]
    run()
    simulated = [tick for tick in ticks if tick.decision]
    assert {type(step) for tick in simulated for step in tick.plan.steps} >= kinds
    assert {tick.decision.reason for tick in simulated if tick.decision.kind == "scale_hold"} >= holds
    for tick in simulated:
        offset = time.time() - tick.now
        _assert_alike(tick, ticks, offset, _memories(tick, offset))


def test_after_a_role_switch_the_service_ticks_on_like_the_simulator(ticks):
    """With the memory that it stored itself; what it starts from is written once."""
    disaggregated(P, D, D, D, most=4)
    simulated = list(ticks)
    first = next(index for index, tick in enumerate(simulated) if tick.switched)
    window = simulated[first : first + 8]
    offset = time.time() - window[-1].now
    states = _memories(window[0], offset)
    giving = [tick for tick in window if tick.stage.config.role == "decode"]
    assert giving[0].before.changed_at == window[0].now, "its cool-down began when it gave"
    for tick in window:
        assert states == {role: _like(state) for role, state in _memories(tick, offset).items()}
        states = _assert_alike(tick, ticks, offset, states)


def test_an_instance_that_is_drained_while_it_switches_its_role_does_not_serve_again(ticks, monkeypatch):
    """An operator lowers the maximum of the stage that has just been given an instance."""
    whole = elastic.Elastic.tick

    def lowered(scalers, now):
        whole(scalers, now)
        if any(tick.switched for tick in ticks):
            scalers.stages[0].config = replace(PREFILL, max_instances=1)

    monkeypatch.setattr(elastic.Elastic, "tick", lowered)
    long = [Demand(f"long{i}", 0.01 * i, 50, 900, PATIENT, max_tokens=900) for i in range(3)]
    result = disaggregated(P, D, D, D, policy="round_robin", most=4, others=long)
    simulated = list(ticks)
    index = next(index for index, tick in enumerate(simulated) if tick.said == ("scale_in", "above_max"))
    (switched,) = set().union(*(tick.switched for tick in simulated[:index]))
    drained = simulated[index]
    assert drained.plan.steps == (Drain(switched),)
    offset = time.time() - drained.now
    _assert_alike(drained, ticks, offset, _memories(drained, offset), switching={switched})
    after = simulated[index + 2].stage.seen
    assert [member.state for member in after.members if member.id == switched] == ["draining"]
    assert {use.id for use in result.instances} == {f"engine-{slot}" for slot in range(4)}


def _memories(tick, offset):
    """The memory before the tick, by role, as the service would have stored it."""
    found = {tick.stage.config.role: tick.before}
    if tick.stage.other is not None:
        found[tick.stage.other.config.role] = tick.stage.other.memory
    return {role: _stored(memory, offset) for role, memory in found.items()}


def _stored(memory, offset):
    times = ("seen_at", "low_since", "changed_at", "calm_since", "spare_since")
    raw = memory.to_json()
    return {name: value + offset if name in times and value is not None else value for name, value in raw.items()}


def _like(state):
    return {name: pytest.approx(value) if isinstance(value, float) else value for name, value in state.items()}


def _assert_alike(tick, ticks, offset, states, switching=()):
    """One tick of the service; returns the memory that it leaves, by role. The database is as before afterwards."""
    ticks.clear()
    with transaction.atomic():
        recorded = _tick_of_the_service(tick, offset, states, switching)
        left = {row.policy.role: row.state for row in ScalerState.objects.select_related("policy")}
        _carried_out(tick.plan, recorded)
        transaction.set_rollback(True)
    (again,) = ticks
    assert _states(again.stage.seen) == _states(tick.stage.seen)
    assert (again.said, again.plan.steps) == (tick.said, tick.plan.steps)
    role = tick.stage.config.role
    expected = {**states, role: _stored(tick.after, offset)}
    if tick.plan.giving is not None:
        expected[tick.stage.other.config.role] = _stored(tick.plan.giving, offset)
    assert left == {role: _like(state) for role, state in expected.items()}
    return left


def _states(seen):
    return {member.id: member.state for member in seen.members}


def _tick_of_the_service(tick, offset, states, switching):
    """The fleet of the tick in the database, and the tick that sees it. Its instances have no launch template, so what
    a start takes is told in place of a history of starts."""
    stage, now = tick.stage, tick.now + offset
    model = served_model_create(actor=SYSTEM, name=stage.config.model)
    policy = _policy(model, stage.config, sleep_level=stage.sleep_level)
    _instances(model, stage.config.role, stage.seen, switching)
    for spare in stage.spares:
        _spare(model, stage.config.role, spare, offset)
    looks = {stage.config.role: stage.seen}
    policies = [policy]
    if stage.other is not None:
        policies.append(_policy(model, stage.other.config))
        _instances(model, stage.other.config.role, stage.other.seen)
        looks[stage.other.config.role] = stage.other.seen
    if stage.room is not None:
        _machine(Instance.objects.count() + stage.room)
    for each in policies:
        ScalerState.objects.create(policy=each, state=states[each.role])
    ScalerState.objects.update(updated_at=datetime.fromtimestamp(now - 60, tz=UTC))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(scaling_stages, "cold_start_s", lambda pattern: stage.start_s)
        return scaling.scaler_tick(policy_id=policy.pk, fleet=[_message(now, stage, looks)], now=now)


def _policy(model, config, **other):
    names = ("role", "min_instances", "max_instances", "upper", "lower", "sustain_s", "cooldown_s", "interval_s")
    return scaling_policy_create(
        actor=SYSTEM, model=model, warm=0, **{name: getattr(config, name) for name in names}, **other
    )


def _instances(model, role, seen, switching=()):
    """`switching`: those whose engine is being told of this role and which have the other one until then."""
    for member in seen.members:
        if member.id in switching:
            _instance(model, "decode" if role == "prefill" else "prefill", member.id, "ready")
            shipped_templates_store()
            template = LaunchTemplate.objects.get(backend="sglang")
            Instance.objects.filter(pk=member.id).update(backend="sglang", template=template)
            role_order(actor=SYSTEM, instance_id=member.id, role=role)
        else:
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


def _message(now, stage, looks):
    """What a gateway would publish of it. The load is told as a wait, so that no rate has to be guessed."""
    names = {"id": "id", "utilisation": "utilisation", "running": "outstanding", "needed": "needed", "speed": "speed"}
    instances = [
        {**{name: getattr(member, of) for name, of in names.items()}, "waiting": 0}
        for seen in looks.values()
        for member in seen.members
    ]
    wanted = [spare.id for spare in stage.spares if spare.needed]
    stages = {
        role: {"arrival_rate": 0.0, "service_rate": 0.0, "queued": seen.queued, "wait_over_slo": min(seen.load, 1e6)}
        for role, seen in looks.items()
    }
    traffic = {**next(iter(stages.values())), "migrating": 0, "migrate_wait_over_slo": 0.0, "stages": stages}
    models = {stage.config.model: traffic}
    told = {"instances": instances, "models": models, "wanted": wanted, "counted_s": stage.seen.counted_s}
    return {"at": now - 0.1, "period_s": 1.0, **told}


def _carried_out(plan, decision):
    """The service did what its plan says, and recorded it."""
    if decision is None:
        assert plan.steps == ()
        return
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
