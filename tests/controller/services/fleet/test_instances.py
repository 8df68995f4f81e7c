"""Instances: changes are audited, observations are not; both reach the gateways; cost runs while it is provisioned."""

from __future__ import annotations

from datetime import timedelta

import pytest
from django.core.exceptions import ValidationError
from django.utils import timezone

from controller.models import Decision, Device, Instance
from controller.selectors.fleet import cost as fleet
from controller.selectors.fleet.weights import weight_plan
from controller.selectors.snapshot import config_version, gateway_snapshot
from controller.services.change import VersionConflict
from controller.services.fleet.instances import (
    instance_create,
    instance_drain,
    instance_observe,
    instance_register,
    instance_remove,
    instance_set_role,
    instance_stop,
    instance_undrain,
    instance_update,
)
from tests import factories
from tests.factories import ACTOR

pytestmark = pytest.mark.django_db
Observed = Instance.Observed


def test_a_created_instance_serves_once_it_was_seen_ready():
    row = instance_create(actor=ACTOR, model=factories.served_model(), spec={"profile": "constant:5ms"})
    assert (row.desired_state, row.observed_state) == ("running", "pending")
    assert gateway_snapshot().instances == ()
    before = config_version()

    assert instance_observe(instance_id=row.id, observed_state=Observed.READY, url="http://127.0.0.1:9/", generation=1)
    assert not instance_observe(instance_id=row.id, observed_state=Observed.READY, url="http://127.0.0.1:9")

    row.refresh_from_db()
    assert (row.url, row.observed_generation) == ("http://127.0.0.1:9", 1)
    assert row.ready_at is not None
    assert [spec.id for spec in gateway_snapshot().instances] == [row.id]
    assert config_version() == before + 1
    assert Decision.objects.count() == 1  # of the desired state


def test_a_static_instance_needs_its_url():
    with pytest.raises(ValidationError) as caught:
        instance_register(actor=ACTOR, id="vllm-1", model=factories.served_model(), url="")
    assert list(caught.value.message_dict) == ["url"]

    with pytest.raises(ValidationError, match="http"):
        instance_register(actor=ACTOR, id="vllm-1", model=factories.served_model(), url="ftp://x")


def test_draining_takes_nothing_new_and_can_be_taken_back():
    row = factories.instance()

    instance_drain(actor=ACTOR, instance_id=row.id, version=1)
    assert gateway_snapshot().draining == (row.id,)
    instance_drain(actor=ACTOR, instance_id=row.id)
    instance_undrain(actor=ACTOR, instance_id=row.id)

    row.refresh_from_db()
    assert gateway_snapshot().draining == ()
    assert (row.desired_state, row.generation, row.version) == ("running", 3, 3)
    assert list(Decision.objects.order_by("id").values_list("kind", flat=True)) == [
        "instance_drained", "instance_undrained",
    ]  # fmt: skip


def test_stopping_is_final_and_at_once():
    row = factories.instance()

    instance_stop(actor=ACTOR, instance_id=row.id)

    assert gateway_snapshot().instances == ()
    with pytest.raises(ValidationError, match="cannot be started again"):
        instance_undrain(actor=ACTOR, instance_id=row.id)


def test_a_stale_version_is_a_conflict():
    row = factories.instance()
    instance_update(actor=ACTOR, instance_id=row.id, version=1, changes={"unit_cost": 2.0})

    with pytest.raises(VersionConflict):
        instance_drain(actor=ACTOR, instance_id=row.id, version=1)
    assert Instance.objects.get(pk=row.id).desired_state == "running"


def test_devices_are_held_from_the_creation_until_the_engine_is_gone():
    model = factories.served_model()
    device = Device.objects.create(host=factories.host(), index=0, kind="a100", memory_bytes=80)
    first = instance_create(actor=ACTOR, model=model, devices=[device])

    with pytest.raises(ValidationError):
        instance_create(actor=ACTOR, model=model, devices=[device])
    assert Instance.objects.count() == 1
    instance_observe(instance_id=first.id, observed_state=Observed.FAILED, error="died")

    assert instance_create(actor=ACTOR, model=model, devices=[device]).holdings.count() == 1


def test_cost_is_provisioned_time_times_unit_cost_in_each_role():
    start = timezone.now() - timedelta(hours=1)
    row = instance_create(actor=ACTOR, model=factories.served_model(), unit_cost=2.0)
    instance_observe(instance_id=row.id, observed_state=Observed.STARTING, at=start)
    instance_observe(instance_id=row.id, observed_state=Observed.READY, at=start + timedelta(seconds=5))
    instance_observe(instance_id=row.id, observed_state=Observed.STOPPED, at=start + timedelta(seconds=30))

    assert row.intervals.count() == 1
    assert fleet.cost(since=start, until=timezone.now()) == pytest.approx(60.0)
    assert fleet.cost(since=start + timedelta(seconds=10), until=start + timedelta(seconds=20)) == pytest.approx(20.0)


def test_only_what_is_gone_is_forgotten():
    row = factories.instance()
    with pytest.raises(ValidationError, match="Stop it before you remove it"):
        instance_remove(actor=ACTOR, instance_id=row.id)
    instance_stop(actor=ACTOR, instance_id=row.id)
    instance_observe(instance_id=row.id, observed_state=Observed.STOPPED)

    instance_remove(actor=ACTOR, instance_id=row.id)

    assert not Instance.objects.exists()


def test_the_newest_observation_of_an_address_wins():
    old = factories.instance(url="http://127.0.0.1:9")
    new = instance_create(actor=ACTOR, model=old.model)

    instance_observe(instance_id=new.id, observed_state=Observed.STARTING, url="http://127.0.0.1:9")

    old.refresh_from_db()
    assert old.url == ""
    assert gateway_snapshot().instances == ()


TWO_RANKS = {"tp": 2, "spec": {"executor": "torch", "folder": "/m"}}


def test_a_part_of_the_kv_cannot_be_moved_so_such_an_engine_takes_both_stages():
    model = factories.served_model()
    with pytest.raises(ValidationError) as refused:
        instance_create(actor=ACTOR, model=model, role="decode", **TWO_RANKS)
    assert list(refused.value.message_dict) == ["role"]
    row = instance_create(actor=ACTOR, model=model, **TWO_RANKS)
    with pytest.raises(ValidationError, match="2 tensor-parallel ranks"):
        instance_set_role(actor=ACTOR, instance_id=row.pk, role="prefill")
    one = instance_create(actor=ACTOR, model=model, role="decode", spec=TWO_RANKS["spec"])
    with pytest.raises(ValidationError, match="2 tensor-parallel ranks"):
        instance_update(actor=ACTOR, instance_id=one.pk, version=one.version, changes={"tp": 2})
    emulated = instance_create(actor=ACTOR, model=model, tp=2)
    assert instance_set_role(actor=ACTOR, instance_id=emulated.pk, role="prefill").role == "prefill"


def test_an_engine_of_two_ranks_that_would_swap_is_refused_before_it_is_started():
    model = factories.served_model()
    swaps = {**TWO_RANKS["spec"], "swap_bytes": 1 << 30}
    with pytest.raises(ValidationError) as refused:
        instance_create(actor=ACTOR, model=model, tp=2, spec=swaps)
    assert list(refused.value.message_dict) == ["spec.swap_bytes"]
    one = instance_create(actor=ACTOR, model=model, spec=swaps)
    with pytest.raises(ValidationError, match="an engine of 2 ranks swaps no KV"):
        instance_update(actor=ACTOR, instance_id=one.pk, version=one.version, changes={"tp": 2})


def test_more_sequences_than_a_step_of_the_spec_has_tokens_are_refused():
    row = instance_create(actor=ACTOR, model=factories.served_model(), spec={"max_num_batched_tokens": 64})
    with pytest.raises(ValidationError) as refused:
        instance_update(actor=ACTOR, instance_id=row.pk, version=row.version, changes={"max_num_seqs": 65})
    assert list(refused.value.message_dict) == ["spec.max_num_batched_tokens"]


@pytest.mark.parametrize(("kv_role", "cannot"), [("kv_producer", "decode"), ("kv_consumer", "prefill")])
def test_a_vllm_server_of_one_side_gets_no_role_of_the_other(kv_role, cannot):
    model, spec = factories.served_model(), {"kv_role": kv_role}
    with pytest.raises(ValidationError, match=f"cannot {cannot}"):
        instance_register(actor=ACTOR, id="v", model=model, url="http://v:1", role=cannot, spec=spec)
    row = instance_register(actor=ACTOR, id="v", model=model, url="http://v:1", spec=spec)
    with pytest.raises(ValidationError, match=f"started with kv_role {kv_role}"):
        instance_set_role(actor=ACTOR, instance_id="v", role=cannot)
    changed = instance_update(
        actor=ACTOR, instance_id="v", version=row.version, changes={"spec": {"kv_role": "kv_both"}}
    )
    assert changed.kv_role == "kv_both"
    assert instance_set_role(actor=ACTOR, instance_id="v", role=cannot).role == cannot


@pytest.mark.parametrize(("backend", "kv_role"), [("vllm", "both"), ("vllm", None), ("reference", "kv_both")])
def test_a_kv_role_that_says_nothing_is_refused(backend, kv_role):
    fields = {"backend": backend, "spec": {"kv_role": kv_role}}
    with pytest.raises(ValidationError, match="kv_producer") as refused:
        instance_register(actor=ACTOR, id="v", model=factories.served_model(), url="http://v:1", **fields)
    assert list(refused.value.message_dict) == ["spec"]


def test_weights_of_several_ranks_come_from_their_disk():
    """Neither side of such a pair is asked, and the plan says why."""
    model = factories.served_model()
    row = factories.instance(model, id="two", weights="absent", **TWO_RANKS)
    factories.instance(model, id="whole")
    plan = weight_plan(row, {})
    assert ([choice.kind for choice in plan.choices], dict(plan.rejected)) == (["disk"], {"whole": "several_ranks"})
    factories.instance(model, id="parts", **TWO_RANKS)
    other = factories.instance(model, id="one", weights="absent")
    plan = weight_plan(other, {})
    assert [choice.id or choice.kind for choice in plan.choices] == ["whole", "disk"]
    assert plan.rejected["parts"] == "several_ranks"
