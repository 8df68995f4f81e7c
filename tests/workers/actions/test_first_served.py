"""Time to the first served request, from records: of a scale-out, and of a server that a command launched."""

from datetime import timedelta

import pytest
from django.db import connection
from django.utils import timezone

from controller.models import Action, Instance
from controller.services.actors import SYSTEM, Actor
from controller.services.decisions import decision_record
from controller.services.fleet.actions import first_served_watch
from controller.services.fleet.instances import instance_stop
from controller.services.fleet.launches import LAUNCH, instance_join, launch_record
from controller.services.records.requests import records_write
from controller.wording.sentences import sentence
from tests import factories
from tests.workers.scripted_engine import order

pytestmark = [pytest.mark.db, pytest.mark.django_db, pytest.mark.usefixtures("patient")]

OLGA = Actor.person("olga")


def served(instance, at, ttft_s, **fields):
    record = factories.record(instance=instance, arrived_at=at.timestamp(), ttft_s=ttft_s, **fields)
    records_write(connection=connection.connection, records=[record])


@pytest.fixture
def watch(warm):
    action = first_served_watch(
        actor=SYSTEM, instance=warm, scale_out={"policy": "m/collocated", "decision": 7, "warm": True}
    )
    Action.objects.filter(pk=action.pk).update(created_at=timezone.now() - timedelta(seconds=60))
    action.refresh_from_db()
    return action


def test_the_first_token_of_whatever_request_had_it_first(watch, look_once):
    assert look_once() == []
    served("warm", watch.created_at + timedelta(seconds=1), 3.0)
    served("warm", watch.created_at + timedelta(seconds=2), 0.5)
    served("other", watch.created_at, 0.1)
    (decision,) = look_once()
    assert (decision.kind, decision.subject, decision.reason) == ("scale_out_served", "m/collocated", "warm")
    assert decision.outcome["first_served_s"] == pytest.approx(2.5, abs=0.01)
    assert (decision.inputs["instance"], decision.inputs["scale_out"]) == ("warm", 7)
    assert look_once() == []


def test_it_says_where_the_weights_came_from(watch, warm, engine, holder, look_once):
    order(warm)
    look_once()
    engine.ends(("engine", holder.url, ""))
    look_once()
    served("warm", watch.created_at, 1.0)
    (decision,) = look_once()
    assert (decision.outcome["source"], decision.outcome["from"]) == ("engine", "holder")
    assert decision.outcome["load_s"] == 0.5


def test_a_prefill_instance_has_served_what_another_one_decoded(watch, look_once):
    Instance.objects.filter(pk="warm").update(role="prefill")
    served("other", watch.created_at + timedelta(seconds=1), 0.5, prefill_instance="warm")
    served("other", watch.created_at, 0.5)
    (decision,) = look_once()
    assert decision.outcome["first_served_s"] == pytest.approx(1.5, abs=0.01)


def test_a_token_of_just_now_may_not_have_been_the_first(watch, look_once):
    served("warm", timezone.now() - timedelta(seconds=3), 1.0)
    assert look_once() == []


def test_an_instance_that_never_serves_is_not_watched_for_ever(watch, look_once):
    Action.objects.update(created_at=timezone.now() - timedelta(hours=2))
    assert [decision.reason for decision in look_once()] == ["never_served"]


def test_an_instance_whose_weights_never_came_was_not_put_to_sleep(watch, warm, engine, look_once):
    order(warm)
    look_once()
    engine.ends(("disk", "", "a tensor is missing"))
    look_once()
    Instance.objects.filter(pk="warm").update(weights="asleep")
    assert [decision.reason for decision in look_once()] == ["never_woke"]
    watch.refresh_from_db()
    assert "a tensor is missing" in watch.error


def test_an_instance_stopped_before_it_served_is_said(watch, look_once):
    instance_stop(actor=OLGA, instance_id="warm")
    assert [decision.reason for decision in look_once()] == ["stopped_before"]


def test_a_launched_server_is_timed_from_its_command(look_once):
    at = timezone.now() - timedelta(seconds=90)
    whom = {"kind": LAUNCH, "subject_type": "instance", "subject": "gpu-2", "reason": "seeded"}
    told = decision_record(actor=SYSTEM, at=at, inputs={"seed": "gpu-1"}, **whom)
    row = instance_join(actor=SYSTEM, id="gpu-2", model=factories.served_model(), url="http://h:1", backend="sglang")
    Instance.objects.filter(pk=row.pk).update(ready_at=at + timedelta(seconds=40))
    assert look_once() == []
    served("gpu-2", at + timedelta(seconds=60), 2.0)
    (decision,) = look_once()
    assert (decision.kind, decision.subject_type, decision.subject) == ("launch_served", "instance", "gpu-2")
    assert decision.inputs == {"launch": told.pk, "seed": "gpu-1"}
    assert decision.outcome["first_served_s"] == pytest.approx(62.0, abs=0.01)
    assert decision.outcome["ready_s"] == pytest.approx(40.0, abs=0.01)
    assert sentence(decision).startswith("gpu-2: first token 62.0 s after its launch command")


def test_a_launched_server_that_is_stopped_has_served_no_request(look_once):
    launch_record(actor=SYSTEM, instance_id="gpu-2", seed="gpu-1", command="c", inputs={}, rejected={})
    row = instance_join(actor=SYSTEM, id="gpu-2", model=factories.served_model(), url="http://h:1", backend="sglang")
    Instance.objects.filter(pk=row.pk).update(desired_state="stopped")
    (decision,) = look_once()
    assert (decision.kind, decision.subject, decision.reason) == ("launch_unserved", "gpu-2", "stopped_before")
