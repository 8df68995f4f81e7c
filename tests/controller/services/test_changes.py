"""What every change by a person leaves behind: an audit record, a version, a notice to gateways; or nothing at all."""

from __future__ import annotations

import pytest
from django.core.exceptions import ValidationError

from controller.core.types import LatencyCoefficients
from controller.models import Decision, PriorityMapping, ScalingPolicy, SLOClass, Tenant
from controller.selectors.snapshot import config_version
from controller.services.actors import Actor
from controller.services.change import VersionConflict
from controller.services.decisions import decision_record
from controller.services.fleet.scaling_policies import scaler_state_save, scaling_policy_create, scaling_policy_update
from controller.services.fleet.served_models import latency_profile_set, served_model_create, served_model_remove
from controller.services.fleet.topology import device_create, host_create, host_remove, link_create
from controller.services.slo.priority_mappings import priority_mapping_create, priority_mapping_update
from controller.services.slo.slo_classes import slo_class_create, slo_class_remove, slo_class_update
from controller.services.slo.tenants import tenant_create, tenant_update
from controller.wording.changes import changed_fields
from controller.wording.sentences import sentence
from tests import factories
from tests.factories import ACTOR

pytestmark = pytest.mark.django_db
SPEED = LatencyCoefficients(0.01, 1e-4, 1e-8, 0.02, 1e-7, 1e-4)


@pytest.fixture
def before() -> int:
    return config_version()


def last_decision() -> Decision:
    return Decision.objects.order_by("id").last()


def test_a_creation_is_audited_and_announced(before):
    row = slo_class_create(actor=ACTOR, name="fast", ttft_s=0.5, tpot_s=0.1)

    decision = last_decision()
    assert (decision.kind, decision.actor, decision.actor_type) == ("slo_class_created", "olga", "person")
    assert (decision.subject_type, decision.subject) == ("slo_class", "fast")
    assert decision.inputs["after"]["ttft_s"] == 0.5
    assert config_version() == before + 1
    assert row.version == 1


def test_a_change_keeps_before_and_after_of_what_changed(before):
    row = factories.slo_class(ttft_s=1.0, tpot_s=0.1)

    changed = slo_class_update(
        actor=ACTOR, slo_class_id=row.pk, version=1, changes={"ttft_s": 2.0, "tpot_s": 0.1, "deadline_s": None}
    )

    assert (changed.version, SLOClass.objects.get(pk=row.pk).ttft_s) == (2, 2.0)
    assert last_decision().inputs == {"before": {"ttft_s": 1.0}, "after": {"ttft_s": 2.0}}
    assert config_version() == before + 1


def test_what_a_foreign_key_refers_to_is_recorded_by_name():
    standard, batch = factories.slo_class(name="standard"), factories.slo_class(name="batch")
    tenant = tenant_create(actor=ACTOR, name="acme", default_class=standard)
    assert last_decision().inputs["names"] == {"default_class": {str(standard.pk): "standard"}}

    tenant_update(actor=ACTOR, tenant_id=tenant.pk, version=1, changes={"default_class": batch, "rpm": 5})

    told = last_decision()
    both = {str(standard.pk): "standard", str(batch.pk): "batch"}
    assert told.inputs["names"] == {"default_class": both}
    assert sentence(told).startswith("olga changed tenant acme: ")
    assert "default class batch (was standard)" in sentence(told)
    rows = {row.name: row for row in changed_fields(told.inputs)}
    assert (rows["default_class"].before, rows["default_class"].after) == ("standard", "batch")


def test_the_second_of_two_savers_sees_the_conflict(before):
    row = factories.slo_class()
    slo_class_update(actor=ACTOR, slo_class_id=row.pk, version=1, changes={"ttft_s": 2.0})

    with pytest.raises(VersionConflict) as caught:
        slo_class_update(actor=Actor.person("nina"), slo_class_id=row.pk, version=1, changes={"ttft_s": 3.0})

    assert (caught.value.seen, caught.value.current) == (1, 2)
    assert SLOClass.objects.get(pk=row.pk).ttft_s == 2.0
    assert Decision.objects.count() == 1
    assert config_version() == before + 1


def test_a_change_that_changes_nothing_leaves_nothing(before):
    row = factories.slo_class(ttft_s=1.0)

    same = slo_class_update(actor=ACTOR, slo_class_id=row.pk, version=1, changes={"ttft_s": 1.0})

    assert (same.version, Decision.objects.count(), config_version()) == (1, 0, before)


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"ttft_s": 0}, "ttft_s"),
        ({"tpot_s": float("nan")}, "tpot_s"),
        ({"value": float("inf")}, "value"),
        ({"target": 1.5}, "target"),
        ({"deadline_s": 0.5}, "deadline_s"),
        ({"ttft_s": "soon"}, "ttft_s"),
        ({"name": "other"}, "name"),
        ({"tenant": None}, "tenant"),
    ],
)
def test_a_wrong_change_names_its_field_and_changes_nothing(before, changes, field):
    row = factories.slo_class(ttft_s=1.0)

    with pytest.raises(ValidationError) as caught:
        slo_class_update(actor=ACTOR, slo_class_id=row.pk, version=1, changes=changes)

    assert list(caught.value.message_dict) == [field]
    assert SLOClass.objects.get(pk=row.pk).version == 1
    assert (Decision.objects.count(), config_version()) == (0, before)


def test_a_name_taken_is_refused():
    slo_class_create(actor=ACTOR, name="fast", ttft_s=0.5, tpot_s=0.1)

    with pytest.raises(ValidationError):
        slo_class_create(actor=ACTOR, name="fast", ttft_s=0.7, tpot_s=0.1)


def test_removing_a_class_leaves_tenants_without_a_default(before):
    row = factories.slo_class()
    tenant = factories.tenant(default_class=row)

    slo_class_remove(actor=ACTOR, slo_class_id=row.pk, version=1)

    assert Tenant.objects.get(pk=tenant.pk).default_class is None
    assert last_decision().inputs["before"]["name"] == row.name
    assert config_version() > before


def test_a_tenants_default_class_is_shared_or_its_own():
    foreign = factories.slo_class(tenant=factories.tenant())
    tenant = tenant_create(actor=ACTOR, name="globex")

    with pytest.raises(ValidationError) as caught:
        tenant_update(actor=ACTOR, tenant_id=tenant.pk, version=1, changes={"default_class": foreign})

    assert list(caught.value.message_dict) == ["default_class"]


@pytest.mark.parametrize(
    ("levels", "field"),
    [
        ([], "levels"),
        ("none", "levels"),
        ([{"ttft_s": 1.0}], "levels.0"),
        ([factories.LEVEL, {**factories.LEVEL, "tpot_s": -1}], "levels.1.tpot_s"),
        ([{**factories.LEVEL, "ttft_s": True}], "levels.0.ttft_s"),
        ([{**factories.LEVEL, "ttft_s": 9.0}], "levels.0.ttft_s"),
        ([factories.LEVEL] * 33, "levels"),
        ([factories.LEVEL, {**factories.LEVEL, "ttft_s": 0.9}, factories.LEVEL], "levels.1.ttft_s"),
        ([factories.LEVEL, {**factories.LEVEL, "tpot_s": 0.09}], "levels.1.tpot_s"),
    ],
)
def test_a_mapping_with_wrong_levels_names_the_place(levels, field):
    with pytest.raises(ValidationError) as caught:
        priority_mapping_create(actor=ACTOR, levels=levels)

    assert list(caught.value.message_dict) == [field]
    assert not PriorityMapping.objects.exists()


def test_a_mapping_is_stored_with_numbers_as_floats():
    row = priority_mapping_create(actor=ACTOR, levels=[{**factories.LEVEL, "ttft_s": 1}])

    changed = priority_mapping_update(actor=ACTOR, mapping_id=row.pk, version=1, changes={"contention": "strict"})

    assert changed.levels == [factories.LEVEL]
    with pytest.raises(ValidationError, match="strict"):
        priority_mapping_update(actor=ACTOR, mapping_id=row.pk, version=2, changes={"contention": "luck"})


@pytest.mark.parametrize(("changes", "field"), [({"max_instances": 0}, "max_instances"), ({"lower": 0.9}, "lower")])
def test_a_scaling_policy_is_checked_by_the_scalers_own_config(changes, field):
    row = scaling_policy_create(actor=ACTOR, model=factories.served_model())

    with pytest.raises(ValidationError) as caught:
        scaling_policy_update(actor=ACTOR, policy_id=row.pk, version=1, changes=changes)

    assert list(caught.value.message_dict) == [field]
    assert ScalingPolicy.objects.get(pk=row.pk).version == 1


def test_the_scalers_state_counts_its_ticks():
    policy = factories.scaling_policy()

    scaler_state_save(policy=policy, state={"low_since": 1.0})
    row = scaler_state_save(policy=policy, state={"low_since": None})

    assert (row.tick, row.state) == (2, {"low_since": None})


def test_a_model_is_found_by_one_name_only():
    served_model_create(actor=ACTOR, name="llama", aliases=["small"])

    with pytest.raises(ValidationError) as caught:
        served_model_create(actor=ACTOR, name="other", aliases=["llama"])

    assert list(caught.value.message_dict) == ["aliases"]


def test_a_model_in_use_is_not_removed():
    instance = factories.instance()

    with pytest.raises(ValidationError, match=instance.id):
        served_model_remove(actor=ACTOR, model_id=instance.model.pk)


def test_a_new_fit_replaces_the_active_one_and_keeps_it_as_history():
    model = factories.served_model()

    old = latency_profile_set(actor=ACTOR, model=model, device_kind="a100", coefficients=SPEED)
    new = latency_profile_set(actor=ACTOR, model=model, device_kind="a100", coefficients=SPEED, samples=40)

    old.refresh_from_db()
    assert (old.active, new.active, model.latency_profiles.count()) == (False, True, 2)
    with pytest.raises(ValidationError) as caught:
        latency_profile_set(actor=ACTOR, model=model, device_kind="a100", coefficients=SPEED._replace(decode_a=-1.0))
    assert list(caught.value.message_dict) == ["coefficients.decode_a"]


def test_topology_is_audited_but_no_matter_for_gateways(before):
    host = host_create(actor=ACTOR, name="h1", labels={"rack": "7"})
    other = host_create(actor=ACTOR, name="h2")
    device_create(actor=ACTOR, host=host, index=0, kind="a100", memory_bytes=80 * 2**30)
    link_create(actor=ACTOR, source=host, target=other, medium="rdma", bandwidth_bytes_s=25e9)
    host_remove(actor=ACTOR, host_id=other.pk, version=1)

    assert list(Decision.objects.order_by("id").values_list("kind", flat=True)) == [
        "host_created", "host_created", "device_created", "link_created", "host_removed",
    ]  # fmt: skip
    assert config_version() == before


def test_a_decision_under_a_used_key_is_not_added_again():
    fields = {"actor": Actor.job("scaler"), "kind": "scale_out", "subject_type": "policy", "reason": "load"}

    first = decision_record(**fields, subject="a", idempotency_key="tick-7")
    again = decision_record(**fields, subject="b", idempotency_key="tick-7")

    assert (first.is_new, again.is_new) == (True, False)
    assert (again.pk, again.subject, Decision.objects.count()) == (first.pk, "a", 1)


def test_the_record_of_a_scaling_policy_names_its_model():
    scaling_policy_create(actor=ACTOR, model=factories.served_model(name="llama"), min_instances=2)

    assert last_decision().subject == "llama collocated: 2 to 4"
