"""Whether somebody said how many sequences an endpoint runs at once: rows of before, and writers of before."""

from importlib import import_module

import pytest
from django.apps import apps

from controller.models import Instance
from tests import factories

pytestmark = [pytest.mark.db, pytest.mark.django_db]


@pytest.mark.parametrize(
    ("provisioner", "number", "said"),
    [("static", 32, None), ("static", 16, 16), ("process", 32, 32), ("process", 16, 16)],
)
def test_the_default_number_of_a_registered_instance_was_not_configured(provisioner, number, said):
    row = factories.instance(provisioner=provisioner, max_num_seqs=number)
    import_module("controller.migrations.0019_seqs_unsaid").of_registered_ones(apps, None)
    assert Instance.objects.get(pk=row.pk).configured_seqs == said


def test_a_number_that_a_former_version_wrote_is_said():
    row = factories.instance(provisioner="static", seqs_unsaid=True)
    Instance.objects.filter(pk=row.pk).update(max_num_seqs=64)
    assert Instance.objects.get(pk=row.pk).configured_seqs == 64
