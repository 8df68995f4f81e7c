"""A drained prefill engine whose KV is still to be pulled: from the gateway's events to the reconciler's decision."""

import asyncio
import time
from dataclasses import replace
from datetime import timedelta

import orjson
import pytest
from django.conf import settings
from django.utils import timezone

from api.openai import status
from controller.models import Action, Decision, Instance
from controller.scale.observation import InstanceRow, observe
from controller.services.actors import SYSTEM
from controller.services.fleet.instances import instance_create, instance_drain, instance_observe
from tests.api.openai.disaggregation.disaggregated import STREAMED, fleet
from tests.api.openai.gateways import TestBed
from tests.waiting import until_on_loop
from workers.actions import sleeping
from workers.actions.sleep_client import SleepState
from workers.backends.fake import Script
from workers.tasks import reconcile

pytestmark = [pytest.mark.db, pytest.mark.django_db]


@pytest.fixture(scope="module")
def published():
    """Published by a gateway: while a prompt's KV waits at `p`, which drains, for room at `d`; and after its answer."""

    async def play():
        async with TestBed(fleet(p="prefill", d="decode")) as bed:
            bed.backend("d", Script(refuse_status=503))
            client = bed.send(STREAMED)
            await until_on_loop(lambda: bed.gateway.scheduler.migrator.waiting() == 1 and not bed.backend("p").running)
            bed.gateway.configure(replace(bed.config, draining=("p",)))
            await asyncio.sleep(0.05)
            kept = status.fleet_message(bed.gateway, 1, [])
            bed.backend("d", Script())
            answer = await client.done()
            assert (answer.status, len(bed.backend("p").calls)) == (200, 1)
            await until_on_loop(lambda: bed.backend("p").freed)
            await asyncio.sleep(0.05)
            return kept, status.fleet_message(bed.gateway, 2, [])

    return [orjson.loads(orjson.dumps(message)) for message in asyncio.run(play())]


@pytest.fixture
def drained(policy, fake):
    """Instance `p`, which drains for five seconds."""
    instance_create(actor=SYSTEM, id="p", model=policy.model, role="prefill", spec={"profile": "constant:5ms"})
    fake.becomes("p", "ready")
    instance_observe(instance_id="p", observed_state=Instance.Observed.READY, url=fake.seen["p"].url)
    instance_drain(actor=SYSTEM, instance_id="p")
    since(5)
    return fake


def since(seconds):
    Instance.objects.filter(pk="p").update(desired_at=timezone.now() - timedelta(seconds=seconds))


def look(fake, monkeypatch, *messages):
    now = time.time()
    monkeypatch.setattr(reconcile, "fleet_or_nothing", lambda: [{**message, "at": now} for message in messages])
    for _ in range(2):
        reconcile.reconcile_once({"process": fake, "static": type(fake)()}, now)
    return Instance.objects.get(pk="p").desired_state


def test_it_stops_when_its_kv_was_pulled_and_not_before(drained, published, monkeypatch):
    kept, freed = published
    (item,) = (each for each in kept["instances"] if each["id"] == "p")
    assert (item["state"], item["running"], item["waiting"]) == ("draining", 0, 0)
    assert look(drained, monkeypatch, kept) == "draining"
    assert look(drained, monkeypatch, freed) == "stopped"
    assert Decision.objects.get(kind="instance_drained", actor="reconciler").reason == "drained"


@pytest.mark.parametrize(("timeout_s", "state"), [(60.0, "stopped"), (61.5, "draining"), (None, "draining")])
def test_or_when_its_drain_times_out(drained, published, monkeypatch, timeout_s, state):
    """None: the default, which is as long as the gateway lets an answer take."""
    monkeypatch.setattr(settings, "DRAIN_TIMEOUT_S", timeout_s or settings.DRAIN_TIMEOUT_S)
    since(61)
    assert look(drained, monkeypatch, published[0]) == state
    since(settings.DRAIN_TIMEOUT_S + 1)
    assert look(drained, monkeypatch, published[0]) == "stopped"
    assert Decision.objects.get(kind="instance_drained", actor="reconciler").reason == "drain_timeout"


def test_the_default_is_what_the_gateway_lets_an_answer_take():
    from workers.backends.base import Limits

    assert settings.DRAIN_TIMEOUT_S == Limits().total_s == 900


def test_the_scaler_counts_it_as_work(published):
    """So that of two idle prefill instances the one without KV is drained."""
    now = time.time()
    fleets = [{**published[0], "at": now}]
    rows = [InstanceRow(name, "running", "ready", False) for name in ("p", "q")]
    seen = observe(rows, fleets, now, "demo", role="prefill")
    assert [member.outstanding for member in seen.members] == [1, 0]


def test_an_engine_that_keeps_kv_does_not_fall_asleep(drained, published, monkeypatch):
    monkeypatch.setattr(sleeping, "read_fleet", lambda: [{**published[0], "at": time.time()}])
    action = Action(instance_id="p", created_at=timezone.now() - timedelta(seconds=100))
    assert sleeping._drains(action, SleepState(awake=True, level=0, requests=0))
    monkeypatch.setattr(sleeping, "read_fleet", lambda: [{**published[1], "at": time.time()}])
    assert not sleeping._drains(action, SleepState(awake=True, level=0, requests=0))
