"""Scaling by hand: the scaler keeps the number that an operator set, whatever the load is, until its time is over."""

from __future__ import annotations

from datetime import timedelta

import pytest
from django.core.exceptions import ValidationError
from django.db import IntegrityError, transaction
from django.utils import timezone

from controller.models import Decision, Instance, ScalingPolicy
from controller.services.change import VersionConflict
from controller.services.fleet.scaling_policies import (
    scaling_policy_hold,
    scaling_policy_put,
    scaling_policy_release,
    scaling_policy_update,
)
from controller.services.replace import ExpectedVersion
from tests.factories import ACTOR
from tests.workers.tasks.test_scaling import fleet, tick

pytestmark = pytest.mark.django_db


def hold(policy, instances, **other):
    fields = {"until": timezone.now() + timedelta(hours=1), "reason": "a launch", "version": None} | other
    return scaling_policy_hold(actor=ACTOR, policy_id=policy.pk, instances=instances, **fields)


def ticked(policy, load, *ids):
    policy.refresh_from_db()
    return tick(policy, fleet(load, *ids))


def test_more_are_started_at_any_load(policy, two):
    hold(policy, 4)
    decision = ticked(policy, 0.5, *two)
    assert (decision.kind, len(decision.outcome["started"])) == ("scale_out", 2)


def test_fewer_are_kept_under_overload(policy, two):
    hold(policy, 1)
    decision = ticked(policy, 0.95, *two)
    assert decision.kind == "scale_in"
    assert Instance.objects.filter(desired_state="draining").count() == 1


def test_as_many_as_there_are_stay_until_it_ends(policy, two):
    hold(policy, 2)
    assert ticked(policy, 0.95, *two).kind == "scale_hold"
    scaling_policy_release(actor=ACTOR, policy_id=policy.pk)
    assert ticked(policy, 0.95, *two).kind == "scale_out"


def test_its_time_ends_by_itself(policy, two):
    hold(policy, 1)
    ScalingPolicy.objects.filter(pk=policy.pk).update(held_until=timezone.now() - timedelta(seconds=1))
    assert ticked(policy, 0.95, *two).kind == "scale_out"


def test_it_is_audited_with_its_reason_and_survives_a_change_of_the_policy(policy):
    row = hold(policy, 3, version=policy.version)
    decision = Decision.objects.get(kind="scaling_policy_updated")
    assert decision.actor == ACTOR.name
    assert decision.inputs["after"] | {"held_until": ""} == {
        "held_instances": 3,
        "held_until": "",
        "held_for": "a launch",
    }
    scaling_policy_update(actor=ACTOR, policy_id=policy.pk, version=row.version, changes={"upper": 0.9})
    put = {"actor": ACTOR, "model": policy.model, "role": policy.role, "values": {}, "expected": ExpectedVersion()}
    row, _ = scaling_policy_put(**put)
    assert (row.held_instances, row.held_for) == (3, "a launch")
    assert row.bounds(timezone.now()) == (3, 3)


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"instances": 0}, "instances"),
        ({"instances": 1_001}, "instances"),
        ({"reason": " "}, "reason"),
        ({"until": timezone.now() - timedelta(seconds=1)}, "until"),
        ({"until": timezone.now() + timedelta(days=30)}, "until"),
    ],
)
def test_what_is_wrong_names_its_field(policy, fields, field):
    with pytest.raises(ValidationError) as raised:
        hold(policy, **{"instances": 2, **fields})
    assert set(raised.value.message_dict) == {field}


def test_a_disabled_policy_and_another_version_are_refused(policy):
    with pytest.raises(VersionConflict):
        hold(policy, 2, version=policy.version + 1)
    ScalingPolicy.objects.filter(pk=policy.pk).update(enabled=False)
    with pytest.raises(ValidationError, match="disabled"):
        hold(policy, 2)


@pytest.mark.parametrize(
    "fields", [{"held_instances": 2}, {"held_instances": 0, "held_until": timezone.now(), "held_for": "x"}]
)
def test_the_database_refuses_half_of_it(policy, fields):
    with pytest.raises(IntegrityError), transaction.atomic():
        ScalingPolicy.objects.filter(pk=policy.pk).update(**fields)
