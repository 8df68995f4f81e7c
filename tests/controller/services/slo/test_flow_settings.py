"""The flow settings: one row, checked, versioned and audited."""

import json
from dataclasses import asdict

import pytest
from django.core.exceptions import ValidationError
from django.db import IntegrityError, transaction

from controller.core.snapshot import snapshot_from_json
from controller.models import ConfigVersion, Decision, FlowSettings
from controller.selectors.snapshot import gateway_snapshot
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


@pytest.mark.parametrize(
    ("values", "field", "told"),
    [
        ({"ordering": "alphabetical"}, "ordering", "valid: apparent_tardiness_cost"),
        ({"ordering": "calm", "ordering_options": {"window": 1}}, "ordering_options", "no setting 'window'"),
        ({"ordering": "calm", "ordering_options": {"frame_steps": 0}}, "ordering_options", "at least 1"),
        ({"ordering": "calm", "ordering_options": [1]}, "ordering_options", "JSON object"),
        ({"ordering": "calm", "ordering_options": {"x" * 3_000: 1}}, "ordering_options", "at most 2000"),
        ({"ordering_options": {"frame_steps": 1}}, "ordering_options", "Choose one"),
    ],
)
def test_a_wrong_ordering_names_its_field(values, field, told):
    with pytest.raises(ValidationError) as raised:
        flow_settings_create(actor=ACTOR, **values)
    assert set(raised.value.message_dict) == {field}
    assert told in raised.value.message_dict[field][0]


def test_the_ordering_reaches_gateways():
    assert (gateway_snapshot().ordering, gateway_snapshot().ordering_options) == ("", {})
    flow_settings_create(actor=ACTOR, ordering="calm", ordering_options={"frame_steps": 100})
    found = gateway_snapshot()
    assert (found.ordering, found.ordering_options) == ("calm", {"frame_steps": 100})
    assert snapshot_from_json(json.loads(json.dumps(asdict(found)))) == found
