"""Before an instance is put to sleep: who else would serve, what nobody would do then, what each level keeps."""

from __future__ import annotations

import html
from datetime import timedelta

import pytest
from django.urls import reverse
from django.utils import timezone

from console.panels.instance_actions import sleep_choices, who_is_left
from controller.models import Action, Instance, ScalingPolicy, ServedModel
from controller.models.fleet import Role
from controller.services.fleet.actions import action_end, action_lease
from controller.services.fleet.sleeping import sleep_order
from tests import factories

MODEL = ServedModel(pk=1, name="demo")


def left(role, policy=None, **others):
    row = Instance(id="a", model=MODEL, role=role, backend="reference")
    return who_is_left(row, {Role(name): count for name, count in others.items()}, policy)


@pytest.mark.parametrize("role", ["collocated", "prefill", "decode"])
def test_the_last_that_serves(role):
    said = left(role)
    assert said.startswith("Warning: this is the last serving instance of demo.")
    assert said.endswith("0 instances of demo would remain.")


@pytest.mark.parametrize("role", ["collocated", "prefill"])
def test_the_last_that_prefills(role):
    said = left(role, decode=2)
    assert said.startswith("Warning: this is the last instance of demo that prefills.")
    assert said.endswith("2 instances of demo would remain (2 decode).")


def test_the_last_that_decodes():
    assert "Warning: this is the last decode instance for 1 prefill instance of demo." in left("decode", prefill=1)
    assert "Warning" not in left("decode", collocated=1)
    assert "Warning" not in left("decode", prefill=1, decode=1)


def test_one_of_many_is_counted_without_a_warning():
    assert left("collocated", collocated=2, decode=1) == ("3 instances of demo would remain (2 collocated, 1 decode).")


def test_the_scalers_least_is_said():
    policy = ScalingPolicy(model=MODEL, role="decode", min_instances=2)
    assert "The scaling policy for decode requires at least 2, so the scaler wakes or starts one." in left(
        "decode", policy, decode=1
    )
    assert "scaling policy" not in left("decode", policy, decode=2)


def test_only_those_that_take_requests_now_are_counted(db):
    row = factories.instance(id="d-1", role="decode")
    factories.instance(row.model, id="p-1", role="prefill")
    factories.instance(row.model, id="d-2", role="decode", weights="asleep")
    factories.instance(row.model, id="d-3", role="decode", desired_state="draining")
    factories.instance(row.model, id="d-4", role="decode", observed_state="starting")
    factories.instance(id="d-5", role="decode")
    choices = sleep_choices(row)
    assert choices
    for choice in choices:
        assert "this is the last decode instance for 1 prefill instance" in choice.effect
        assert "1 instance of " in choice.effect.split("Until")[0]


@pytest.mark.parametrize(
    ("backend", "source"),
    [("reference", "from a peer or from disk"), ("vllm", "from disk"), ("sglang", "without --enable-w")],
)
def test_each_level_says_what_it_keeps(db, backend, source):
    first, second = sleep_choices(factories.instance(backend=backend))
    assert "keeps its weights in host memory" in first.effect
    assert "discards its weights" in second.effect
    assert source in second.effect


def test_the_page_warns_and_offers_both_levels(operator, live_store):
    row = factories.instance()
    address = reverse("instance", args=[row.pk])
    page = html.unescape(operator.get(address).content.decode())
    assert page.count("Warning: this is the last serving instance of") == 2
    act = {"instance": row.pk, "version": row.version, "action": "sleep_2"}
    said = operator.post(reverse("instance-act"), act, follow=True).content
    assert b"will sleep once its running requests finish. Its weights are discarded." in said
    assert b"Sleep (level 2)" not in said
    assert Action.objects.get(instance=row, kind=Action.Kind.SLEEP).params["level"] == 2


@pytest.mark.parametrize(("provisioner", "button"), [("process", "Stop"), ("static", "Stop sending")])
def test_a_registered_server_is_not_said_to_be_stopped(operator, live_store, provisioner, button):
    row = factories.instance(provisioner=provisioner)
    page = html.unescape(operator.get(reverse("instance", args=[row.pk])).content.decode())
    assert f'value="stop" class="danger">{button}</button>' in page
    assert ("Slackline did not start this server and does not stop it" in page) == (provisioner == "static")
    data = {"instance": row.pk, "action": "stop", "version": row.version}
    said = operator.post(reverse("instance-act"), data, follow=True).content.decode()
    assert ("Its server keeps running." in said) == (provisioner == "static")
    row.refresh_from_db()
    assert row.desired_state == "stopped"


def test_a_level_that_its_engine_has_no_sleep_mode_for_is_not_offered(db):
    """SGLang sleeps at level 1 only with a backup of its weights, at level 2 only without."""
    row = factories.instance(backend="sglang", ready_at=timezone.now() - timedelta(hours=1))
    assert [each.action for each in sleep_choices(row)] == ["sleep", "sleep_2"]
    sleep_order(actor=factories.ACTOR, instance_id=row.pk, level=2)
    action = action_lease(action_id=Action.objects.get().pk)
    told = {"reason": "no_sleep_mode", "inputs": {}, "outcome": {}}
    action_end(action=action, state="failed", kind="instance_sleep_failed", subject=("instance", row.pk), **told)
    assert [each.action for each in sleep_choices(row)] == ["sleep"]
    Instance.objects.update(ready_at=timezone.now())
    assert [each.action for each in sleep_choices(row)] == ["sleep", "sleep_2"]
