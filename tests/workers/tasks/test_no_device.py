"""Capacity is bounded by devices: what the scaler starts holds one, and without a free one it says so once."""

from __future__ import annotations

from collections import Counter

import pytest

from controller.models import Decision, Instance
from controller.services.actors import SYSTEM
from controller.services.fleet.instances import instance_observe, instance_stop, instance_update
from controller.services.fleet.scaling_policies import scaling_policy_update
from controller.services.fleet.topology import device_create, host_create
from tests.workers.tasks import test_stages
from tests.workers.tasks.test_scaling import fleet, tick
from tests.workers.tasks.test_stages import CALM_DECODE, stages

__all__ = ["stages"]  # a fixture
pytestmark = [pytest.mark.db, pytest.mark.django_db]
READY, STOPPED = Instance.Observed.READY, Instance.Observed.STOPPED


def machine(devices, ids):
    """A host with so many devices, on which these instances run."""
    host = host_create(actor=SYSTEM, name="box")
    for index in range(devices):
        device_create(actor=SYSTEM, host=host, index=index, kind="a100", memory_bytes=1 << 30)
    for id in ids:
        row = Instance.objects.get(pk=id)
        instance_update(actor=SYSTEM, instance_id=id, version=row.version, changes={"host": host})


def held(id):
    rows = Instance.objects.get(pk=id).holdings.filter(released_at__isnull=True)
    return list(rows.values_list("device__index", flat=True))


def test_a_scale_out_holds_a_device_and_the_last_one_ends_it(policy, two):
    machine(3, two)
    (new,) = tick(policy, fleet(0.95, *two)).outcome["started"]
    assert [held(id) for id in (*two, new)] == [[0], [1], [2]]
    instance_observe(instance_id=new, observed_state=READY, url="http://h:9")

    decision = tick(policy, fleet(0.95, *two, new))
    assert (decision.kind, decision.reason) == ("scale_hold", "no_device")
    assert tick(policy, fleet(0.95, *two, new)) is None, "said once, not every second"
    assert Instance.objects.count() == 3

    instance_stop(actor=SYSTEM, instance_id="e1")
    instance_observe(instance_id="e1", observed_state=STOPPED)
    (next_one,) = tick(policy, fleet(0.95, "e2", new)).outcome["started"]
    assert held(next_one) == [0]


def test_the_warm_pool_takes_no_more_than_is_free(policy, two):
    machine(3, two)
    policy.refresh_from_db()
    scaling_policy_update(actor=SYSTEM, policy_id=policy.pk, version=policy.version, changes={"warm": 2})
    decision = tick(policy, fleet(0.5, *two))
    assert (decision.kind, len(decision.outcome["started"])) == ("scale_warm", 1)
    assert held(decision.outcome["started"][0]) == [2]
    instance_observe(instance_id=decision.outcome["started"][0], observed_state=READY, url="http://h:9")
    assert tick(policy, fleet(0.5, *two)) is None


@pytest.mark.parametrize(("devices", "most", "warm"), [(4, 4, 2), (8, 4, 2), (8, 3, 1), (2, 4, 0), (0, 4, 0)])
def test_a_policy_that_says_nothing_keeps_as_many_warm_as_devices_and_its_bound_allow(policy, two, devices, most, warm):
    assert policy.warm is None
    if devices:
        machine(devices, two)
    scaling_policy_update(actor=SYSTEM, policy_id=policy.pk, version=policy.version, changes={"max_instances": most})
    decision = tick(policy, fleet(0.5, *two))
    started = [] if decision is None else decision.outcome["started"]
    assert len(started) == warm
    for number, name in enumerate(started):
        instance_observe(instance_id=name, observed_state=READY, url=f"http://w:{number}")
    assert tick(policy, fleet(0.5, *two)) is None
    assert Instance.objects.filter(weights="absent").count() == warm


def test_a_warm_one_that_is_taken_leaves_no_room_for_another(policy, two):
    machine(3, two)
    (name,) = tick(policy, fleet(0.5, *two)).outcome["started"]
    instance_observe(instance_id=name, observed_state=READY, url="http://w:1")
    decision = tick(policy, fleet(0.95, *two))
    assert (decision.kind, decision.outcome["started"]) == ("scale_out", [name])
    assert tick(policy, fleet(0.5, *two, name)) is None


def test_policies_on_one_machine_share_its_free_devices(stages):
    prefill, _ = stages
    machine(8, ["p1", "d1", "d2", "d3"])
    test_stages.tick(prefill, test_stages.fleet(p1=0.5, d1=0.5, d2=0.5, d3=0.5))
    warm = Instance.objects.filter(weights="absent")
    assert (warm.filter(role="prefill").count(), warm.count()) == (2, 2)


def warm_by_role():
    return dict(
        Counter(Instance.objects.filter(weights="absent", desired_state="running").values_list("role", flat=True))
    )


@pytest.mark.parametrize("first", ["prefill", "decode"])
@pytest.mark.parametrize("free", [1, 3])
def test_the_odd_device_goes_to_one_of_two_policies_and_stays_there(stages, first, free):
    both = sorted(stages, key=lambda policy: policy.role != first)
    machine(4 + free, ["p1", "d1", "d2", "d3"])
    calm = test_stages.fleet(p1=0.5, d1=0.5, d2=0.5, d3=0.5)
    for _ in range(3):
        for policy in both:
            test_stages.tick(policy, calm)
    assert sum(warm_by_role().values()) == free, "every device is used"
    assert {role: warm_by_role().get(role, 0) for role in ("prefill", "decode")} == {
        "prefill": (free + 1) // 2, "decode": free // 2,
    }  # fmt: skip
    assert not Decision.objects.filter(kind="scale_warm", reason="pool_above_target").exists(), "nobody gave any back"


def test_who_took_all_devices_gives_the_others_theirs_once(stages):
    """What was stopped holds its device until it is gone: meanwhile nobody gives another."""
    prefill, decode = stages
    scaling_policy_update(actor=SYSTEM, policy_id=decode.pk, version=decode.version, changes={"enabled": False})
    machine(8, ["p1", "d1", "d2", "d3"])
    calm = test_stages.fleet(p1=0.5, d1=0.5, d2=0.5, d3=0.5)
    test_stages.tick(prefill, calm)
    assert warm_by_role() == {"prefill": 4}
    decode.refresh_from_db()
    scaling_policy_update(actor=SYSTEM, policy_id=decode.pk, version=decode.version, changes={"enabled": True})
    decode.refresh_from_db()
    for _ in range(2):
        test_stages.tick(decode, calm)
        test_stages.tick(prefill, calm)
        assert warm_by_role() == {"prefill": 2}
    for row in Instance.objects.filter(desired_state="stopped"):
        instance_observe(instance_id=row.pk, observed_state=STOPPED)
    for _ in range(2):
        test_stages.tick(prefill, calm)
        test_stages.tick(decode, calm)
        assert warm_by_role() == {"prefill": 2, "decode": 2}


@pytest.mark.parametrize(("kind", "mine"), [("a100", 2), ("t4", 4)])
def test_only_policies_whose_instances_run_on_the_same_devices_share_them(stages, kind, mine):
    prefill, _ = stages
    machine(8, ["p1", "d1", "d2", "d3"])
    Instance.objects.filter(role="prefill").update(device_kind="a100")
    Instance.objects.filter(role="decode").update(device_kind=kind)
    test_stages.tick(prefill, test_stages.fleet(p1=0.5, d1=0.5, d2=0.5, d3=0.5))
    assert warm_by_role() == {"prefill": mine}


def test_a_policy_that_keeps_none_warm_is_left_its_part_to_scale_out_with(stages):
    prefill, decode = stages
    scaling_policy_update(actor=SYSTEM, policy_id=decode.pk, version=decode.version, changes={"warm": 0})
    machine(8, ["p1", "d1", "d2", "d3"])
    test_stages.tick(prefill, test_stages.fleet(p1=0.5, d1=0.5, d2=0.5, d3=0.5))
    assert Instance.objects.filter(weights="absent").count() == 2


def test_without_a_free_device_the_other_stage_still_gives_one(stages):
    prefill, decode = stages
    machine(4, ["p1", "d1", "d2", "d3"])
    messages = test_stages.fleet(**{**CALM_DECODE, "d1": 0.35, "d2": 0.32, "d3": 0.35})
    test_stages.tick(decode, messages)
    decision = test_stages.tick(prefill, messages)
    assert decision.outcome == {"switched": {"instance": "d2", "from": "decode"}}
    assert Decision.objects.filter(reason="no_device").count() == 0
    assert Instance.objects.count() == 4
