"""The flow settings: one row, checked, versioned and audited."""

import pytest
from django.core.exceptions import ValidationError
from django.db import IntegrityError, transaction

from controller.models import ConfigVersion, Decision, FlowSettings
from controller.services.replace import ExpectedVersion
from controller.services.slo.flow_settings import flow_settings_create, flow_settings_put, flow_settings_update
from controller.wording.sentences import sentence
from tests.factories import ACTOR

pytestmark = [pytest.mark.db, pytest.mark.usefixtures("db")]


def test_a_change_is_audited_and_announced():
    flow_settings_create(actor=ACTOR, flow_policy="mfs")
    before = ConfigVersion.objects.get().version
    row = flow_settings_update(actor=ACTOR, version=1, changes={"flow_policy": "fair_sharing"})
    assert row.version == 2
    assert ConfigVersion.objects.get().version == before + 1
    told = [sentence(each) for each in Decision.objects.order_by("pk")]
    assert told[0] == "olga created the flow settings"
    assert told[1].startswith("olga changed the flow settings: "), told[1]


def test_a_wrong_policy_names_its_field():
    with pytest.raises(ValidationError) as raised:
        flow_settings_create(actor=ACTOR, flow_policy="karuna")
    assert set(raised.value.message_dict) == {"flow_policy"}
    assert not Decision.objects.exists()


@pytest.mark.parametrize("values", [{"pk": 2}, {"flow_policy": "karuna"}])
def test_the_database_refuses_it_too(values):
    with pytest.raises(IntegrityError), transaction.atomic():
        FlowSettings.objects.create(**{"pk": 1, **values})


def test_a_put_creates_it_then_replaces_it():
    _, created = flow_settings_put(actor=ACTOR, values={"flow_policy": "mfs"}, expected=ExpectedVersion())
    row, again = flow_settings_put(actor=ACTOR, values={}, expected=ExpectedVersion())
    assert (created, again, row.flow_policy) == (True, False, "off"), "an absent value gets its default"
