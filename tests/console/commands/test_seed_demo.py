"""The demo data: usable at once, and a second run changes nothing that somebody relies on."""

from __future__ import annotations

import json
from io import StringIO

import pytest
from django.contrib.auth import authenticate
from django.core.management import call_command

from console.management import demo
from controller.models import ApiKey, Decision, Instance, SLOClass
from controller.selectors.catalogue import key_of_secret
from controller.selectors.snapshot import config_version, gateway_snapshot
from controller.services.slo.api_keys import api_key_revoke
from controller.services.slo.slo_classes import slo_class_update
from tests.factories import ACTOR

pytestmark = pytest.mark.django_db


@pytest.fixture(autouse=True)
def data_dir(settings, tmp_path):
    settings.DATA_DIR = tmp_path
    return tmp_path


def seed(*arguments: str) -> None:
    call_command("seed_demo", *arguments, stdout=StringIO())


def credentials(data_dir) -> dict:
    return json.loads((data_dir / "credentials.json").read_text())


def test_it_gives_what_make_up_prints(data_dir):
    seed()

    known = credentials(data_dir)
    assert key_of_secret(known["api_key"]).tenant.name == "demo"
    assert set(known["keys"]) == {"demo", "acme", "research"}
    for role in demo.PEOPLE:
        person = authenticate(username=known[role], password=known[f"{role}_password"])
        assert [group.name for group in person.groups.all()] == [role]
    assert (data_dir / "credentials.json").stat().st_mode & 0o777 == 0o600


def test_it_configures_gateway_and_fleet():
    seed()

    snapshot = gateway_snapshot()
    assert {entry.name for entry in snapshot.classes} == {"interactive", "standard", "summaries", "analytics", "batch"}
    assert len(snapshot.mappings[0].levels) == 4
    assert snapshot.models[0].name == demo.MODEL
    kept = {tenant.name: tenant.retention_s for tenant in snapshot.tenants}
    assert kept == {"demo": demo.RETENTION_S, "acme": 0, "research": 0}
    desired = Instance.objects.order_by("id").values_list("id", "provisioner", "desired_state")
    assert list(desired) == [("engine-1", "process", "running"), ("engine-2", "process", "running")]


def test_a_second_run_changes_nothing(data_dir):
    seed()
    known, version, decisions = credentials(data_dir), config_version(), Decision.objects.count()

    seed()

    assert credentials(data_dir) == known
    assert (config_version(), Decision.objects.count()) == (version, decisions)


def test_what_an_operator_changed_stays(data_dir):
    seed()
    row = SLOClass.objects.get(name="batch")
    slo_class_update(actor=ACTOR, slo_class_id=row.pk, version=row.version, changes={"ttft_s": 90.0})
    Instance.objects.filter(pk="engine-1").update(desired_state="stopped")

    seed()

    assert SLOClass.objects.get(name="batch").ttft_s == 90.0
    assert Instance.objects.get(pk="engine-1").desired_state == "stopped"
    assert Instance.objects.count() == 2


def test_a_lost_secret_is_replaced_and_the_old_key_revoked(data_dir):
    seed()
    old = credentials(data_dir)
    (data_dir / "credentials.json").unlink()

    seed()

    new = credentials(data_dir)
    assert new["api_key"] != old["api_key"]
    assert key_of_secret(old["api_key"]) is None
    assert authenticate(username="operator", password=new["operator_password"]) is not None


def test_the_documented_key_is_given_only_when_asked_for(data_dir):
    seed()
    assert credentials(data_dir)["api_key"] != demo.DEMO_SECRET

    seed("--demo")

    assert credentials(data_dir)["api_key"] == demo.DEMO_SECRET
    assert ApiKey.objects.filter(name="demo", revoked_at=None, tenant__name="demo").count() == 1


def test_a_documented_key_that_was_revoked_stays_dead(data_dir):
    seed("--demo")
    api_key_revoke(actor=ACTOR, key_id=ApiKey.objects.get(tenant__name="demo").pk)

    seed("--demo")

    assert credentials(data_dir)["api_key"] != demo.DEMO_SECRET
    assert key_of_secret(demo.DEMO_SECRET) is None
