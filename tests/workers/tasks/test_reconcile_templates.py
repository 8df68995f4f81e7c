"""The reconciler and launch templates: starts that fail pause them, their limits, and the steps that are stored."""

import time
from datetime import timedelta

import pytest
from django.utils import timezone

from controller.models import Decision, Instance, LaunchTemplate
from controller.selectors.snapshot import gateway_snapshot
from controller.services.actors import SYSTEM
from controller.services.fleet.instances import (
    instance_create,
)
from controller.services.fleet.launch_templates import launch_template_pause, shipped_templates_store
from controller.services.fleet.scaling_stages import stage_of
from controller.wording.sentences import sentence

pytestmark = [pytest.mark.django_db, pytest.mark.db]


@pytest.fixture
def templates(db):
    shipped_templates_store()
    return {row.name: row for row in LaunchTemplate.objects.all()}


def test_three_failed_starts_pause_the_template_and_not_the_fleet(look, fake, one, policy, templates):
    instance_create(actor=SYSTEM, id="v1", model=policy.model, template=templates["vllm"])
    fake.becomes("e1", "ready")
    for _ in range(6):
        look(2)
        for id in [id for id in fake.seen if id != "e1"]:
            fake.becomes(id, "exited", exit_code=1, error="CUDA error")
        look()
        Instance.objects.exclude(pk="e1").filter(desired_state="running").update(spec={})
    rows = Instance.objects.exclude(pk="e1").order_by("created_at")
    assert [row.observed_state for row in rows] == ["failed"] * 3
    assert rows.last().error.startswith("given up, and its template vllm is paused: 3 in a row never became ready")
    paused = Decision.objects.get(kind="launch_template_paused")
    assert sentence(paused).endswith(f"the last was {rows.last().pk} (exit code 1: CUDA error)")
    assert LaunchTemplate.objects.get(name="vllm").paused_reason == "exit code 1: CUDA error"
    assert not LaunchTemplate.objects.exclude(name="vllm").exclude(paused_at=None).exists()
    assert Instance.objects.get(pk="e1").observed_state == "ready"


def test_the_scaler_says_that_the_template_is_paused(look, fake, policy, templates):
    row = instance_create(actor=SYSTEM, id="v1", model=policy.model, template=templates["vllm"])
    assert stage_of(policy, [], time.time()).capacity.can_add(time.time())
    launch_template_pause(actor=SYSTEM, row=row.template, instance="v1", failures=3, error="exit code 1")
    view = stage_of(policy, [], time.time())
    assert not view.capacity.can_add(time.time())
    assert view.capacity.observation(time.time()).held_by == "template_paused"


def test_a_template_that_never_served_does_not_keep_the_scaler_from_the_one_that_did(look, fake, policy, templates):
    """Somebody tried another template: only that one is paused, also where the model has been scaled to zero."""
    instance_create(actor=SYSTEM, id="v1", model=policy.model, template=templates["vllm"])
    look()
    fake.becomes("v1", "ready")
    look()
    tried = instance_create(actor=SYSTEM, id="v2", model=policy.model, template=templates["sglang"])
    launch_template_pause(actor=SYSTEM, row=tried.template, instance="v2", failures=3, error="exit code 1")
    for gone in ((), ("v2",), ("v2", "v1")):
        Instance.objects.filter(pk__in=gone).update(desired_state="stopped", observed_state="stopped")
        view = stage_of(policy, [], time.time())
        assert (view.pattern.pk, view.capacity.can_add(time.time())) == ("v1", True), gone
        assert gateway_snapshot().on_demand == ("mid",), gone
    launch_template_pause(actor=SYSTEM, row=templates["vllm"], instance="v1", failures=3, error="exit code 1")
    assert stage_of(policy, [], time.time()).capacity.observation(time.time()).held_by == "template_paused"
    assert gateway_snapshot().on_demand == ()


def test_one_that_served_is_not_replaced_from_a_paused_template(look, fake, policy, templates):
    row = instance_create(actor=SYSTEM, id="v1", model=policy.model, template=templates["vllm"])
    look()
    fake.becomes("v1", "ready")
    look()
    launch_template_pause(actor=SYSTEM, row=row.template, instance="x", failures=3, error="exit code 1")
    fake.becomes("v1", "exited", exit_code=-9)
    look(3)
    row = Instance.objects.get()
    assert row.error == "not replaced, since its template vllm is paused: was killed by signal 9"
    assert Decision.objects.get(kind="instance_given_up").reason == "template_paused"


def test_the_start_limit_is_the_templates(look, fake, policy, templates):
    instance_create(actor=SYSTEM, id="v1", model=policy.model, template=templates["vllm"])
    look()
    for minutes, there in ((29, True), (31, False)):
        Instance.objects.filter(pk="v1").update(desired_at=timezone.now() - timedelta(minutes=minutes))
        fake.becomes("v1", "starting", started_at=time.time() - 60 * minutes)
        look()
        assert (Instance.objects.get(pk="v1").observed_state == "starting") == there
    assert Instance.objects.get(pk="v1").error == "not ready within 1800 s"


def test_the_steps_of_a_start_are_stored(look, fake, policy, templates):
    instance_create(actor=SYSTEM, id="v1", model=policy.model, template=templates["vllm"])
    look()
    fake.becomes("v1", "starting", steps={"process": 5.0})
    look(2)
    assert Instance.objects.get(pk="v1").start_steps == {"process": 5.0}
    fake.becomes("v1", "ready", steps={"process": 5.0, "weights": 7.0, "ready": 9.0})
    look(2)
    assert Instance.objects.get(pk="v1").start_steps == {"process": 5.0, "weights": 7.0, "ready": 9.0}
