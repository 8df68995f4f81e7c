"""Experiments and previews of the current policy set take the ordering that the flow settings choose."""

from __future__ import annotations

import pytest

from console.forms.experiments import policy_now
from controller.services.slo.flow_settings import flow_settings_create
from tests.factories import ACTOR

pytestmark = pytest.mark.django_db


def test_an_experiment_with_the_current_policy_set_is_in_the_ordering_in_force(settings):
    assert policy_now("slackline") == {"name": "slackline"}
    settings.DISPATCH_OVERRIDES = {"ordering": {"name": "calm", "copies": 2}, "dispatch": {"scan_limit": 4}}
    flow_settings_create(actor=ACTOR, flow_policy="off", ordering="calm", ordering_options={"frame_steps": 9})
    chosen = {"ordering": {"name": "calm", "frame_steps": 9}, "dispatch": {"scan_limit": 4}}
    assert policy_now("slackline") == {"name": "slackline", "overrides": chosen}
    assert policy_now("round_robin") == {"name": "round_robin"}
