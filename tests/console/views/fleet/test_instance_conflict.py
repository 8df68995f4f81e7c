"""An action on an instance that changed meanwhile: nothing happens, and the differences are shown."""

from __future__ import annotations

import re

import pytest
from django.urls import reverse

from console.panels.instance_conflict import states
from controller.models import Decision, Instance
from controller.services.actors import Actor
from controller.services.fleet.actions import weights_load_order
from controller.services.fleet.instances import instance_drain, instance_set_role, instance_stop, instance_update
from controller.services.fleet.sleeping import sleep_order, wake_order
from tests import factories

OLGA = Actor.person("olga")
ROW = re.compile(
    r'<th scope="row" title="(\w+)">.*?<td class="before"[^>]*>(.*?)</td>.*?<td class="after"[^>]*>(.*?)</td>', re.S
)


@pytest.fixture
def row(db, live_store, monkeypatch):
    for place in ("instances", "role"):
        monkeypatch.setattr(f"console.views.fleet.{place}.announce_config", lambda: None)
    row = factories.instance(id="engine-x")
    factories.instance(id="engine-y", model=row.model)
    return row


def as_shown(row):
    """What the instance's page sends with each button."""
    return {"instance": row.pk, "version": row.version, "seen": f"{row.desired_state} {row.role} {row.weights}"}


def act(client, shown, action):
    return client.post(reverse("instance-act"), {**shown, "action": action})


def set_role(client, shown, role):
    return client.post(reverse("instance-role", args=[shown["instance"]]), {**shown, "role": role})


def differences(answer):
    bare = [re.sub("<.*?>", "", cell) for found in ROW.findall(answer.content.decode()) for cell in found]
    return {bare[i]: (bare[i + 1], bare[i + 2]) for i in range(0, len(bare), 3)}


def fields_of(answer, button):
    """The hidden fields and the button of the page's own form, as a browser sends them."""
    html = answer.content.decode().split('aria-labelledby="again-title"')[1]
    hidden = dict(re.findall(r'<input type="hidden" name="(instance|version|seen)" value="([^"]*)"', html))
    name, value = re.search(rf'<button name="(\w+)" value="(\w+)"[^>]*>{re.escape(button)}<', html).groups()
    return {**hidden, name: value}


def test_the_page_of_the_instance_tells_what_it_shows(operator, row):
    html = operator.get(reverse("instance", args=[row.pk])).content.decode()
    assert html.count('name="seen" value="running collocated present"') == html.count('name="version"') > 1
    html = operator.get(reverse("instance-role", args=[row.pk])).content.decode()
    assert html.count('name="seen" value="running collocated present"') == 2


def test_the_second_of_two_sees_who_did_what_and_can_do_it_to_what_is_there_now(operator, row):
    shown = as_shown(row)
    instance_drain(actor=OLGA, instance_id=row.pk)
    answer = act(operator, shown, "stop")
    html = answer.content.decode()
    assert answer.status_code == 412
    assert differences(answer) == {"desired_state": ("running", "draining")}
    assert ">olga</td>" in html
    assert reverse("decision", args=[Decision.objects.get(kind="instance_drained").pk]) in html
    assert Instance.objects.get(pk=row.pk).desired_state == "draining"
    again = operator.post(reverse("instance-act"), fields_of(answer, "Stop"))
    assert again.status_code == 302
    assert Instance.objects.get(pk=row.pk).desired_state == "stopped"


def test_what_both_wanted_is_not_done_twice(operator, row):
    shown = as_shown(row)
    instance_drain(actor=OLGA, instance_id=row.pk)
    answer = act(operator, shown, "drain")
    assert answer.status_code == 412
    assert "Drain is not possible while engine-x is ready and its desired state is draining." in answer.content.decode()
    assert b'name="action"' not in answer.content
    assert Decision.objects.count() == 1


def test_a_settings_change_is_shown_with_its_values(operator, row):
    shown = as_shown(row)
    instance_update(actor=OLGA, instance_id=row.pk, version=None, changes={"unit_cost": 7.5, "max_num_seqs": 9})
    answer = act(operator, shown, "drain")
    assert set(differences(answer)) == {"unit_cost", "max_num_seqs"}
    assert "7.5" in differences(answer)["unit_cost"][1]
    assert Instance.objects.get(pk=row.pk).desired_state == "running"


@pytest.mark.parametrize("asked", ["sleep", "sleep_2", "drain"])
def test_an_instance_that_falls_asleep_meanwhile(operator, row, asked):
    Instance.objects.filter(pk=row.pk).update(observed_state="ready")
    shown = as_shown(row)
    sleep_order(actor=OLGA, instance_id=row.pk)
    answer = act(operator, shown, asked)
    assert answer.status_code == 412
    assert differences(answer)["weights"][0] == "present"
    assert reverse("decision", args=[Decision.objects.get(kind="instance_sleep_ordered").pk]) in answer.content.decode()
    possible = asked == "drain"
    assert (b"Not possible now" not in answer.content) is possible


def test_each_order_is_recorded_with_the_version_that_it_made(db):
    """Otherwise the page could not tell orders since then from earlier ones."""
    spare = factories.instance(weights="absent", observed_state="ready")
    weights_load_order(actor=OLGA, instance_id=spare.pk)
    for weights, order in (("present", sleep_order), ("asleep", wake_order)):
        row = factories.instance(weights=weights, observed_state="ready", backend="vllm")
        order(actor=OLGA, instance_id=row.pk)
    found = {each.kind: each.outcome["version"] for each in Decision.objects.all()}
    assert found == {f"instance_{what}_ordered": 2 for what in ("load", "sleep", "wake")}


def test_a_stale_role_change_shows_the_differences_and_the_effects(operator, row):
    shown = as_shown(row)
    instance_set_role(actor=OLGA, instance_id=row.pk, role="decode")
    answer = set_role(operator, shown, "collocated")
    assert answer.status_code == 412
    assert differences(answer) == {"role": ("collocated", "decode")}
    assert "It prefills and decodes" in answer.content.decode()
    assert set_role(operator, fields_of(answer, "Change role to collocated"), "collocated").status_code == 302
    assert Instance.objects.get(pk=row.pk).role == "collocated"


def test_a_stale_role_change_that_is_impossible_now_says_why(operator, row):
    shown = as_shown(row)
    instance_stop(actor=OLGA, instance_id=row.pk)
    answer = set_role(operator, shown, "decode")
    assert answer.status_code == 412
    assert "The role of a stopped instance cannot change." in answer.content.decode()


@pytest.mark.parametrize(
    "seen", ["", "x", "running", "<b>run</b> collocated present", "present running decode", "a " * 9]
)
def test_what_no_page_tells_is_not_shown(operator, row, seen):
    assert states(seen) == {}
    shown = as_shown(row) | {"seen": seen}
    instance_drain(actor=OLGA, instance_id=row.pk)
    answer = act(operator, shown, "stop")
    assert answer.status_code == 412
    assert differences(answer) == {}
    assert b"<b>run" not in answer.content


def test_a_viewer_gets_no_such_page(viewer, row):
    shown = as_shown(row) | {"version": 99}
    assert act(viewer, shown, "stop").status_code == 403
