"""What the migration that begins to keep the role of an engine's start makes of the rows that are there."""

from datetime import timedelta
from importlib import import_module

import pytest
from django.apps import apps
from django.utils import timezone

from controller.models import Instance, InstanceInterval
from tests import factories

pytestmark = [pytest.mark.db, pytest.mark.django_db]


@pytest.mark.parametrize(
    ("provisioner", "had", "expected"),
    [
        ("process", ["prefill", "decode"], "prefill"),
        ("process", [], ""),
        ("static", [], "collocated"),
        ("static", ["decode", "prefill"], "decode"),
    ],
)
def test_the_role_of_the_start_is_that_of_the_first_interval(provisioner, had, expected):
    row, now = factories.instance(provisioner=provisioner), timezone.now()
    for hour, role in enumerate(had):
        began = now + timedelta(hours=hour)
        InstanceInterval.objects.create(
            instance=row, role=role, unit_cost=1.0, started_at=began, ended_at=began + timedelta(hours=1)
        )
    import_module("controller.migrations.0018_started_role").from_first_interval(apps, None)
    assert Instance.objects.get(pk=row.pk).started_role == expected
