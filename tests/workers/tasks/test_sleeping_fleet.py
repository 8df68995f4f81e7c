"""Sleep as a way to scale: who is woken before anything is started, and who is put to sleep instead of stopped."""

import asyncio
import json
from dataclasses import replace
from datetime import timedelta

import orjson
import pytest
from django.core.exceptions import ValidationError
from django.db import connection
from django.utils import timezone

from api.openai import status
from controller.core.snapshot import ModelConfig
from controller.core.types import InstanceSpec, LatencyCoefficients
from controller.models import Action, Device, Host, Instance
from controller.services.actors import RECONCILER, SCALER, SYSTEM, Actor
from controller.services.fleet.actions import action_end, action_lease, first_served_watch
from controller.services.fleet.instances import instance_drain, instance_observe, instance_register, instance_stop
from controller.services.fleet.scaling_policies import scaling_policy_update
from controller.services.fleet.sleeping import sleep_order, wake_order
from tests.api.openai.gateways import TestBed, completion, snapshot
from tests.waiting import until_on_loop
from tests.workers.tasks.test_scaling import fleet, tick

pytestmark = [pytest.mark.db, pytest.mark.django_db]


def ends(kind, instance_id, state="done", reason="test"):
    """As the worker would have it end."""
    action = Action.objects.get(instance=instance_id, kind=kind, state__in=Action.OPEN)
    return action_end(
        action=action_lease(action_id=action.pk), state=state, kind=kind, subject=("instance", instance_id),
        reason=reason, inputs={}, outcome={}, error="" if state == "done" else "truncated",
    )  # fmt: skip


def asleep(instance_id, level=1):
    sleep_order(actor=SYSTEM, instance_id=instance_id, level=level)
    ends("sleep", instance_id)
    row = Instance.objects.get(pk=instance_id)
    assert (row.weights, row.sleep_level) == ("asleep", level)
    return row


def vllm(policy, id, number):
    row = instance_register(actor=SYSTEM, id=id, model=policy.model, url=f"http://v:{number + 1}")
    instance_observe(instance_id=id, observed_state=Instance.Observed.READY)
    return row


def wanting(policy, **changes):
    policy.refresh_from_db()
    return scaling_policy_update(actor=SYSTEM, policy_id=policy.pk, version=policy.version, changes=changes)


# ---- out ------------------------------------------------------------------------------------------------------------


def test_a_sleeper_is_no_capacity_and_is_woken_before_a_new_one_is_started(policy, two):
    asleep("e2")
    decision = tick(policy, fleet(0.95, "e1"))
    assert (decision.kind, decision.inputs["ready"]) == ("scale_out", 1)
    assert decision.outcome == {"started": ["e2"], "woken": {"e2": {"level": 1}}}
    assert Instance.objects.count() == 2
    row = Instance.objects.get(pk="e2")
    assert (row.weights, row.sleep_level) == ("loading", 1)  # a reference engine loads them like a warm one
    load = Action.objects.get(kind="weights_load")
    assert (load.params["woken"], load.params["scale_out"]["decision"]) == (1, decision.pk)
    held = tick(policy, fleet(0.95, "e1"))
    assert (held.reason, held.inputs["starting"]) == ("settling", 1)
    ends("weights_load", "e2")
    row.refresh_from_db()
    assert (row.weights, row.sleep_level) == ("present", 0)


QUICK = LatencyCoefficients(0.01, 1e-4, 0.0, 0.02, 0.0, 0.0)  # 500 tokens take 0.06 s
SLOW = LatencyCoefficients(0.01, 1e-2, 0.0, 0.02, 0.0, 0.0)  # 5 s


async def after_a_refusal():
    """What a gateway publishes once `e2` has gone to sleep and a request came that only it could keep."""
    e1, e2 = (InstanceSpec(id, "mid", backend="fake", latency=latency) for id, latency in (("e1", SLOW), ("e2", QUICK)))
    models = (ModelConfig("mid", (), context_tokens=1000),)
    config = replace(snapshot(()), instances=(e1, e2), models=models)
    body = completion(model="mid", prompt=[1] * 500, target_ttft=0.3)
    async with TestBed(config) as bed:
        assert (await bed.ask(body)).status == 200
        bed.gateway.configure(replace(config, instances=(e1,)))
        await until_on_loop(lambda: len(bed.gateway.fleet.seats) == 1)
        before = status.fleet_message(bed.gateway, 1, [])
        assert (await bed.ask(body)).error["code"] == "slo_infeasible"
        return [orjson.loads(orjson.dumps(each)) for each in (before, status.fleet_message(bed.gateway, 2, []))]


def test_a_sleeper_is_woken_once_a_request_was_refused_that_only_it_can_keep(policy, two):
    """From the gateway's answer to the order, at no load."""
    before, after = asyncio.run(after_a_refusal())
    asleep("e2")
    assert tick(policy, [before]) is None
    decision = tick(policy, [after])
    assert (decision.kind, decision.reason) == ("scale_out", "needed_asleep")
    assert decision.outcome == {"started": ["e2"], "woken": {"e2": {"level": 1}}}
    assert Instance.objects.get(pk="e2").weights == "loading"


def gone(instance_id):
    """As the reconciler would end its drain."""
    instance_stop(actor=RECONCILER, instance_id=instance_id)
    instance_observe(instance_id=instance_id, observed_state=Instance.Observed.STOPPED)


def test_one_like_a_stopped_instance_is_started_once_a_request_was_refused_that_only_it_could_keep(policy, two):
    """From the scale-in to the gateway's answer and the order. A third instance that came later is the pattern of all
    others."""
    before, after = asyncio.run(after_a_refusal())
    idle = fleet(0.05, *two)
    idle[0]["instances"][0]["running"] = 7
    assert tick(policy, idle).inputs["instance"] == "e2"
    gone("e2")
    assert tick(policy, [before]) is None
    decision = tick(policy, [after])
    assert (decision.kind, decision.reason, decision.outcome["like"]) == ("scale_out", "needed_stopped", ["e2"])
    new = Instance.objects.get(pk=decision.outcome["started"][0])
    assert (new.desired_state, new.spec["seed"]) == ("running", 2)
    tick(policy, [after])
    assert Instance.objects.count() == 3


@pytest.mark.parametrize("by", ["a person", "a person after the scaler", "nobody"])
def test_one_that_a_person_stopped_stays_away(policy, two, by):
    _, after = asyncio.run(after_a_refusal())
    if by == "a person":
        instance_drain(actor=SYSTEM, instance_id="e2")
        gone("e2")
    elif by == "a person after the scaler":
        instance_drain(actor=SCALER, instance_id="e2")
        instance_stop(actor=Actor.person("eve"), instance_id="e2")
        instance_observe(instance_id="e2", observed_state=Instance.Observed.STOPPED)
    else:
        instance_observe(instance_id="e2", observed_state=Instance.Observed.FAILED)
    assert tick(policy, [after]) is None
    assert Instance.objects.count() == 2


def test_none_is_started_where_one_with_the_same_settings_serves(policy, two):
    """It keeps the targets no better than that one, so the scaler would start one after the other."""
    _, after = asyncio.run(after_a_refusal())
    Instance.objects.filter(pk="e1").update(spec=Instance.objects.get(pk="e2").spec)
    instance_drain(actor=SCALER, instance_id="e2")
    gone("e2")
    assert tick(policy, [after]) is None


def test_none_is_started_without_a_free_device(policy, two):
    _, after = asyncio.run(after_a_refusal())
    host = Host.objects.create(name="h")
    Device.objects.create(host=host, index=0, kind="gpu", memory_bytes=1)
    Instance.objects.filter(pk="e2").update(host=host, device_kind="gpu", tp=2)
    instance_drain(actor=SCALER, instance_id="e2")
    gone("e2")
    assert tick(policy, [after]) is None
    Device.objects.create(host=host, index=1, kind="gpu", memory_bytes=1)
    assert tick(policy, [after]).reason == "needed_stopped"


def test_a_drain_is_taken_back_once_a_request_was_refused_that_only_it_could_keep(policy, two):
    """The gateway lets it finish and names it."""
    _, after = asyncio.run(after_a_refusal())
    instance_drain(actor=SCALER, instance_id="e2")
    (e1,) = after["instances"]
    after["instances"].append({**e1, "id": "e2", "state": "draining", "needed": True})
    decision = tick(policy, [after])
    assert (decision.reason, decision.inputs["instance"]) == ("needed_draining", "e2")
    assert Instance.objects.get(pk="e2").desired_state == "running"


def test_somebody_elses_vllm_that_sleeps_can_be_woken(policy, two):
    Instance.objects.update(provisioner="static")
    vllm(policy, "v1", 1)
    asleep("v1", 2)
    decision = tick(policy, fleet(0.95, *two))
    assert decision.outcome == {"started": ["v1"], "woken": {"v1": {"level": 2}}}
    wake = Action.objects.get(kind="wake")
    assert (wake.instance_id, wake.params["level"], wake.params["scale_out"]["woken"]) == ("v1", 2, True)
    assert Instance.objects.get(pk="v1").weights == "waking"


def test_the_one_whose_weights_are_nearest_goes_first(policy, two):
    for number, (id, level) in enumerate((("v-deep", 2), ("v-light", 1))):
        vllm(policy, id, number)
        asleep(id, level)
    (warm,) = tick(wanting(policy, warm=1), fleet(0.5, *two)).outcome["started"]
    instance_observe(instance_id=warm, observed_state=Instance.Observed.READY, url="http://w:1")
    taken = []
    for _ in range(3):
        taken += tick(policy, fleet(0.95, *two)).outcome["started"]
        Instance.objects.filter(pk=taken[-1]).update(weights="present", sleep_level=0, observed_state="unreachable")
    assert taken == ["v-light", warm, "v-deep"]


def test_a_sleeper_that_did_not_wake_up_is_left_alone_for_a_while(policy, two):
    Instance.objects.update(provisioner="static")
    vllm(policy, "v1", 1)
    asleep("v1")
    tick(policy, fleet(0.95, *two))
    ends("wake", "v1", "failed")
    assert Instance.objects.get(pk="v1").weights == "asleep"
    assert tick(policy, fleet(0.95, *two)).reason == "nothing_to_start"
    Action.objects.update(ended_at=timezone.now() - timedelta(minutes=6))
    assert tick(policy, fleet(0.95, *two)).outcome["started"] == ["v1"]


def test_a_sleeper_does_not_count_as_warm_and_is_not_stopped_with_the_pool(policy, two):
    asleep("e2")
    policy = wanting(policy, min_instances=0, warm=1)
    decision = tick(policy, fleet(0.5, "e1"))
    assert (decision.kind, decision.inputs) == ("scale_warm", {"warm": 0, "wanted": 1})
    wanting(policy, warm=0)
    stopped = tick(policy, fleet(0.5, "e1")).outcome["stopped"]
    assert stopped == decision.outcome["started"]


def test_one_watch_at_a_time(policy, two):
    row = Instance.objects.get(pk="e1")
    first = first_served_watch(actor=SYSTEM, instance=row, scale_out={"policy": "mid/collocated", "decision": 1})
    assert first_served_watch(actor=SYSTEM, instance=row, scale_out={"policy": "mid/collocated"}) == first


def test_a_wake_up_that_no_source_helps_leaves_a_reference_engine_asleep(policy, two):
    asleep("e2", 2)
    wake_order(actor=SYSTEM, instance_id="e2")
    ends("weights_load", "e2", "failed")
    row = Instance.objects.get(pk="e2")
    assert (row.weights, row.sleep_level, row.desired_state) == ("asleep", 2, "running")


# ---- in -------------------------------------------------------------------------------------------------------------


def test_a_policy_may_scale_in_by_sleep(policy, two):
    policy = wanting(policy, sleep_level=2)
    decision = tick(policy, fleet(0.05, *two))
    assert (decision.kind, decision.outcome) == ("scale_in", {"asleep": ["e1"]})
    row = Instance.objects.get(pk="e1")
    assert (row.weights, row.sleep_level, row.desired_state) == ("leaving", 2, "running")
    sleep = Action.objects.get(kind="sleep")
    assert sleep.params["scale_in"]["decision"] == decision.pk
    assert tick(policy, fleet(0.05, "e2")) is None  # one serves: no fewer
    ends("sleep", "e1")
    assert tick(policy, fleet(0.95, "e2")).outcome["woken"] == {"e1": {"level": 2}}


def test_somebody_elses_endpoints_scale_in_by_sleep_only(policy, two):
    Instance.objects.update(provisioner="static", backend="vllm")
    assert tick(policy, fleet(0.05, *two)) is None
    decision = tick(wanting(policy, sleep_level=1), fleet(0.05, *two))
    assert decision.outcome == {"asleep": ["e1"]}
    assert Instance.objects.get(pk="e1").desired_state == "running"


def test_one_that_would_not_fall_asleep_is_left_alone_for_a_while(policy, two):
    Instance.objects.update(provisioner="static", backend="vllm")
    policy = wanting(policy, sleep_level=1)
    assert tick(policy, fleet(0.05, *two)).outcome == {"asleep": ["e1"]}
    ends("sleep", "e1", "failed")
    assert tick(policy, fleet(0.05, *two)).outcome == {"asleep": ["e2"]}
    ends("sleep", "e2", "failed")
    assert tick(policy, fleet(0.05, *two)) is None
    Action.objects.update(ended_at=timezone.now() - timedelta(minutes=6))
    assert tick(policy, fleet(0.05, *two)).outcome == {"asleep": ["e1"]}


def test_an_engine_without_sleep_mode_is_not_tried_again_until_it_is_started_again(policy, two):
    Instance.objects.update(provisioner="static", backend="vllm")
    policy = wanting(policy, sleep_level=1)
    for name in two:
        assert tick(policy, fleet(0.05, *two)).outcome == {"asleep": [name]}
        ends("sleep", name, "failed", "no_sleep_mode")
    Action.objects.update(ended_at=timezone.now() - timedelta(hours=1))
    Instance.objects.update(ready_at=timezone.now() - timedelta(hours=2))
    assert tick(policy, fleet(0.05, *two)) is None
    Instance.objects.filter(pk="e2").update(ready_at=timezone.now())
    assert tick(policy, fleet(0.05, *two)).outcome == {"asleep": ["e2"]}


def test_a_process_that_would_not_fall_asleep_is_stopped(policy, two):
    policy = wanting(policy, sleep_level=1)
    assert tick(policy, fleet(0.05, *two)).outcome == {"asleep": ["e1"]}
    ends("sleep", "e1", "failed")
    assert "asleep" not in tick(policy, fleet(0.05, *two)).outcome
    assert Instance.objects.get(pk="e1").desired_state == "draining"


def test_a_sleep_level_there_is_not_is_refused(policy):
    with pytest.raises(ValidationError) as refused:
        wanting(policy, sleep_level=3)
    assert "sleep_level" in json.dumps(refused.value.message_dict)


def test_workers_that_know_of_no_sleep_go_on_adding_rows(db):
    """While an upgrade is under way the tables are newer than some of them."""
    with connection.cursor() as cursor:
        cursor.execute(
            "SELECT table_name, column_default FROM information_schema.columns"
            " WHERE column_name = 'sleep_level' AND table_schema = current_schema()"
        )
        defaults = dict(cursor.fetchall())
    assert defaults == {"instance": "0", "scaling_policy": "0"}
