"""Prefill and decode sized apart, and instances that change sides, against a real database."""

import time
from datetime import timedelta

import psycopg
import pytest
from django.db import connection
from django.utils import timezone

from controller.models import Action, Decision, Instance, InstanceInterval, ScalerState
from controller.selectors.snapshot import gateway_snapshot
from controller.services.actors import SYSTEM
from controller.services.fleet.actions import action_lease
from controller.services.fleet.instances import instance_create, instance_observe
from controller.services.fleet.role_switches import role_kept, role_order
from controller.services.fleet.scaling_policies import LOCK_CLASS, scaling_policy_create, scaling_policy_update
from controller.services.fleet.scaling_stages import stage_of
from controller.services.fleet.served_models import served_model_create
from tests.workers.tasks.test_scaling import tick

pytestmark = [pytest.mark.db, pytest.mark.django_db]


@pytest.fixture
def stages(db):
    """Policies of prefill and decode: one prefill instance, three decode instances, all ready."""
    model = served_model_create(actor=SYSTEM, name="mid")
    policies = [
        scaling_policy_create(
            actor=SYSTEM, model=model, role=role, min_instances=1, max_instances=6, sustain_s=0, cooldown_s=5
        )
        for role in ("prefill", "decode")
    ]
    for name, role in (("p1", "prefill"), ("d1", "decode"), ("d2", "decode"), ("d3", "decode")):
        instance_create(actor=SYSTEM, id=name, model=model, role=role, spec={"profile": "constant:5ms"})
        instance_observe(instance_id=name, observed_state=Instance.Observed.READY, url=f"http://{name}:1")
    return policies


def fleet(**utilisations):
    instances = [{"id": id, "utilisation": u, "running": int(10 * u), "waiting": 0} for id, u in utilisations.items()]
    traffic = {"arrival_rate": 0.0, "service_rate": 0.0, "queued": 0, "wait_over_slo": 0.0}
    traffic |= {"migrating": 0, "migrate_wait_over_slo": 0.0}
    return [{"at": time.time(), "period_s": 1.0, "instances": instances, "models": {"mid": traffic}}]


CALM_DECODE = {"p1": 0.95, "d1": 0.2, "d2": 0.1, "d3": 0.2}


def roles():
    return dict(Instance.objects.order_by("id").values_list("id", "role"))


def test_an_idle_decode_instance_joins_prefill_when_demand_diverges(stages):
    prefill, decode = stages
    messages = fleet(**{**CALM_DECODE, "d1": 0.35, "d2": 0.32, "d3": 0.35})
    tick(decode, messages)
    decision = tick(prefill, messages)
    assert (decision.kind, decision.subject) == ("scale_out", "mid/prefill")
    assert decision.outcome == {"switched": {"instance": "d2", "from": "decode"}}
    assert roles() == {"p1": "prefill", "d1": "decode", "d2": "prefill", "d3": "decode"}
    assert Instance.objects.count() == 4
    change = Decision.objects.get(kind="role_change")
    assert (change.reason, change.subject, change.outcome) == (
        "demand_diverged", "mid/decode", {"instance": "d2", "role": "prefill"},
    )  # fmt: skip
    assert change.inputs["wanting_load"] == 0.95
    assert Decision.objects.filter(kind="instance_role_set", subject="d2", actor="scaler").count() == 1
    ended, running = InstanceInterval.objects.filter(instance="d2").order_by("started_at")
    assert (ended.role, running.role, running.ended_at) == ("decode", "prefill", None)


def test_the_giver_pauses_after_it_gave(stages):
    prefill, decode = stages
    messages = fleet(**{**CALM_DECODE, "d1": 0.35, "d2": 0.32, "d3": 0.35})
    tick(decode, messages)
    tick(prefill, messages)
    state = ScalerState.objects.get(policy=decode).state
    assert (state["spare_since"], time.time() - state["changed_at"] < 5) == (None, True)
    assert tick(decode, fleet(d1=0.1, d3=0.1)).reason == "settling"


def test_before_it_has_been_spare_for_its_hold_a_new_one_is_started(stages):
    prefill, decode = stages
    scaling_policy_update(actor=SYSTEM, policy_id=decode.pk, version=decode.version, changes={"sustain_s": 30})
    tick(decode, fleet(**CALM_DECODE))
    decision = tick(prefill, fleet(**CALM_DECODE))
    (new,) = decision.outcome["started"]
    assert "switched" not in decision.outcome
    assert Instance.objects.get(pk=new).role == "prefill"


def test_a_stage_that_needs_what_it_has_gives_nothing(stages):
    prefill, decode = stages
    messages = fleet(p1=0.95, d1=0.7, d2=0.7, d3=0.7)
    tick(decode, messages)
    assert "started" in tick(prefill, messages).outcome
    assert not Decision.objects.filter(kind="role_change").exists()


def test_a_policy_that_is_off_gives_nothing(stages):
    prefill, decode = stages
    tick(decode, fleet(**CALM_DECODE))
    scaling_policy_update(actor=SYSTEM, policy_id=decode.pk, version=decode.version, changes={"enabled": False})
    assert "started" in tick(prefill, fleet(**CALM_DECODE)).outcome


def test_the_two_stages_are_sized_apart(stages):
    prefill, decode = stages
    assert tick(prefill, fleet(p1=0.5, d1=0.9, d2=0.9, d3=0.9)) is None
    decision = tick(decode, fleet(p1=0.5, d1=0.9, d2=0.9, d3=0.9))
    assert Instance.objects.get(pk=decision.outcome["started"][0]).role == "decode"


@pytest.mark.django_db(transaction=True)  # a tick's lock ends with its transaction, not with the test
def test_while_the_other_stage_ticks_it_is_not_asked(stages):
    prefill, decode = stages
    messages = fleet(**{**CALM_DECODE, "d1": 0.35, "d2": 0.32, "d3": 0.35})
    ScalerState.objects.create(policy=decode, state={"spare_since": time.time() - 60})
    info = connection.get_connection_params()
    with psycopg.connect(
        host=info["host"], port=info["port"], user=info["user"], dbname=info["dbname"], autocommit=True
    ) as other:
        other.execute("SELECT pg_advisory_lock(%s, %s)", [LOCK_CLASS, decode.pk])
        assert "started" in tick(prefill, messages).outcome
        other.execute("SELECT pg_advisory_unlock(%s, %s)", [LOCK_CLASS, decode.pk])  # a closed session's ends later
    Instance.objects.filter(role="prefill").exclude(pk="p1").update(desired_state="stopped", observed_state="stopped")
    ScalerState.objects.filter(policy=prefill).update(state={"ticks": 50})
    assert "switched" in tick(prefill, messages).outcome


def test_servers_of_others_turn_where_their_engine_can_be_told(stages):
    """Nothing can be started for them; the decode stage gives one, which counts as starting until it has switched."""
    prefill, decode = stages
    Instance.objects.update(backend="sglang", provisioner="static")
    messages = fleet(**{**CALM_DECODE, "d1": 0.35, "d2": 0.32, "d3": 0.35})
    tick(decode, messages)
    decision = tick(prefill, messages)
    assert decision.outcome == {"switched": {"instance": "d2", "from": "decode"}}
    (action,) = Action.objects.all()
    assert (action.kind, action.instance_id, action.params["role"]) == ("role_switch", "d2", "prefill")
    assert roles()["d2"] == "decode", "until its engine has switched"
    now = time.time()
    told = {each.id: each.state for each in stage_of(prefill, messages, now).seen.members}
    assert told == {"p1": "ready", "d2": "starting"}
    assert {each.id for each in stage_of(decode, messages, now).seen.members} == {"d1", "d3"}


def test_one_whose_engine_would_not_switch_is_left_alone_for_a_while(stages):
    _, decode = stages
    Instance.objects.update(backend="sglang", provisioner="static")
    role_order(actor=SYSTEM, instance_id="d2", role="prefill")
    action = action_lease(action_id=Action.objects.get().pk)
    role_kept(action=action, reason="not_enabled", error="", field="", restorable=True, inputs={})

    def turning():
        members = stage_of(decode, [], time.time()).seen.members
        return {each.id for each in members if each.takes_both_roles}

    assert turning() == {"d1", "d3"}
    Action.objects.update(ended_at=timezone.now() - timedelta(minutes=6))
    assert turning() == {"d1", "d2", "d3"}


DIVERGED = {**CALM_DECODE, "d1": 0.35, "d2": 0.32, "d3": 0.35}
AS_REGISTERED = {"p1": "prefill", "d1": "decode", "d2": "decode", "d3": "decode"}


@pytest.mark.parametrize(("backend", "spec"), [("reference", {}), ("vllm", {"kv_role": "kv_both"})])
def test_servers_of_others_that_take_either_stage_turn_by_routing(stages, backend, spec):
    """Nothing is started and no engine is told: the row's role is all, and gateways hear of it."""
    prefill, decode = stages
    Instance.objects.update(backend=backend, provisioner="static", spec=spec)
    tick(decode, fleet(**DIVERGED))
    decision = tick(prefill, fleet(**DIVERGED))
    assert (decision.kind, decision.reason) == ("scale_out", "load_above_upper")
    assert decision.outcome == {"switched": {"instance": "d2", "from": "decode"}}
    assert roles() == {**AS_REGISTERED, "d2": "prefill"}
    change = Decision.objects.get(kind="role_change")
    assert (change.reason, change.inputs["instance"], change.inputs["to"]) == ("demand_diverged", "d2", "prefill")
    assert not Action.objects.exists()
    sent_to = {each.id: each.role for each in gateway_snapshot().instances}
    assert (sent_to["d2"], gateway_snapshot().draining) == ("prefill", ())


@pytest.mark.parametrize("spec", [{}, {"kv_role": "kv_producer"}, {"kv_role": "kv_consumer"}])
def test_a_vllm_server_that_is_not_known_to_take_both_stages_stays_what_it_is(stages, spec):
    prefill, decode = stages
    Instance.objects.update(backend="vllm", provisioner="static", spec=spec)
    tick(decode, fleet(**DIVERGED))
    assert tick(prefill, fleet(**DIVERGED)).reason == "nothing_to_start"
    assert roles() == AS_REGISTERED


def test_one_that_may_be_put_to_sleep_is_not_therefore_one_that_turns(stages):
    prefill, decode = stages
    Instance.objects.update(backend="vllm", provisioner="static")
    scaling_policy_update(actor=SYSTEM, policy_id=decode.pk, version=decode.version, changes={"sleep_level": 1})
    tick(decode, fleet(**DIVERGED))
    assert tick(prefill, fleet(**DIVERGED)).reason == "nothing_to_start"
    assert roles() == AS_REGISTERED


def test_the_last_engine_of_its_kind_keeps_its_stage(stages):
    """d2 has the least to do, but the KV of a reference engine that prefills would have nowhere to go."""
    prefill, decode = stages
    Instance.objects.filter(pk__in=["d1", "d3"]).update(
        backend="vllm", provisioner="static", spec={"kv_role": "kv_both"}
    )
    tick(decode, fleet(**DIVERGED))
    assert tick(prefill, fleet(**DIVERGED)).outcome == {"switched": {"instance": "d1", "from": "decode"}}


def test_of_several_the_one_that_takes_both_stages_is_given_though_another_has_less_to_do(stages):
    prefill, decode = stages
    Instance.objects.update(backend="vllm", provisioner="static")
    Instance.objects.filter(pk="d3").update(spec={"kv_role": "kv_both"})
    tick(decode, fleet(**DIVERGED))
    assert tick(prefill, fleet(**DIVERGED)).outcome == {"switched": {"instance": "d3", "from": "decode"}}
