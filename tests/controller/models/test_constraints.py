"""What the database itself refuses, whoever asks."""

from __future__ import annotations

from io import StringIO

import pytest
from django.core.management import call_command
from django.db import IntegrityError, connection, transaction
from django.utils import timezone

from controller.models import (
    ConfigVersion,
    Decision,
    Device,
    Instance,
    InstanceDevice,
    InstanceInterval,
    ScalingPolicy,
    SLOClass,
)
from controller.selectors.partitions import partitions
from controller.services.actors import SYSTEM
from controller.services.decisions import decision_record
from tests import factories

pytestmark = pytest.mark.django_db


def test_migrations_are_complete():
    said = StringIO()
    call_command("makemigrations", "--check", "--dry-run", stdout=said)
    assert "No changes detected" in said.getvalue()


def test_the_migration_leaves_seven_days_of_partitions_and_the_roles():
    days = sorted(partitions())

    assert [(day - days[0]).days for day in days] == list(range(9)), "from the day before to the seventh after"
    assert 1 <= (timezone.now().date() - days[0]).days <= 2, "of the day on which the database was made"
    assert set(factories.Group.objects.values_list("name", flat=True)) >= {"admin", "operator", "viewer"}


@pytest.mark.parametrize("statement", ["UPDATE decision SET reason = 'x'", "DELETE FROM decision"])
def test_decisions_are_append_only(statement):
    decision_record(actor=SYSTEM, kind="k", subject_type="s", subject="s", reason="r")

    with pytest.raises(IntegrityError, match="append-only"), transaction.atomic(), connection.cursor() as cursor:
        cursor.execute(statement)

    assert Decision.objects.get().reason == "r"


def refused(match: str):
    return pytest.raises(IntegrityError, match=match)


@pytest.mark.parametrize(
    ("fields", "rule"),
    [
        ({"ttft_s": 0}, "slo_class_ttft_positive"),
        ({"tpot_s": -1}, "slo_class_tpot_positive"),
        ({"target": 1.01}, "slo_class_target_is_share"),
        ({"ttft_s": 5, "deadline_s": 4}, "slo_class_deadline_after_ttft"),
    ],
)
def test_the_targets_of_an_slo_class_are_possible(fields, rule):
    with refused(rule), transaction.atomic():
        factories.slo_class(**fields)
    assert not SLOClass.objects.exists()


def test_a_shared_class_has_a_name_of_its_own_and_a_tenant_may_take_it_too():
    factories.slo_class(name="fast")
    factories.slo_class(name="fast", tenant=factories.tenant())

    with refused("slo_class_unique"), transaction.atomic():
        factories.slo_class(name="fast", tenant=None)
    assert SLOClass.objects.filter(name="fast").count() == 2


def test_two_live_instances_do_not_share_a_url_but_a_stopped_one_does_not_count():
    url = "http://127.0.0.1:9000"
    factories.instance(url=url, observed_state=Instance.Observed.FAILED)
    factories.instance(url=url)

    with refused("instance_url_unique_while_live"), transaction.atomic():
        factories.instance(url=url)
    assert Instance.objects.filter(url=url).count() == 2


def test_a_device_is_held_by_one_instance_at_a_time():
    device = Device.objects.create(host=factories.host(), index=0, kind="a100", memory_bytes=80)
    first = InstanceDevice.objects.create(instance=factories.instance(), device=device)

    with refused("instance_device_one_live"), transaction.atomic():
        InstanceDevice.objects.create(instance=factories.instance(), device=device)
    InstanceDevice.objects.filter(pk=first.pk).update(released_at=timezone.now())
    InstanceDevice.objects.create(instance=factories.instance(), device=device)
    assert InstanceDevice.objects.filter(device=device, released_at=None).count() == 1


def test_an_instance_has_one_open_interval():
    instance = factories.instance()
    fields = {"instance": instance, "role": "collocated", "unit_cost": 1.0, "started_at": timezone.now()}
    InstanceInterval.objects.create(**fields)

    with refused("instance_interval_one_open"), transaction.atomic():
        InstanceInterval.objects.create(**fields)
    assert instance.intervals.count() == 1


def test_a_scaling_policy_has_bounds_in_order():
    with refused("scaling_policy_bounds"), transaction.atomic():
        factories.scaling_policy(min_instances=3, max_instances=2)
    assert not ScalingPolicy.objects.exists()


def test_there_is_one_configuration_version():
    with refused("config_version_one_row"), transaction.atomic():
        ConfigVersion.objects.create(pk=2)
    assert not ConfigVersion.objects.filter(pk=2).exists()
