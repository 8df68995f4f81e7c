"""A scale-out followed by clicking: from the decision to its instances, to its end, and back."""

from __future__ import annotations

import re
from datetime import timedelta

import pytest
from django.urls import reverse
from django.utils import timezone

from console.panels.scale_outs import way_of, ways_of
from controller.models import Action, Instance
from controller.services.actors import Actor
from controller.services.decisions import decision_record
from tests import factories

THEN = timezone.now().replace(microsecond=0) - timedelta(hours=1)


def after(seconds):
    return THEN + timedelta(seconds=seconds)


def decide(kind, reason="", *, subject=("scaling_policy", "demo/collocated"), at=THEN, inputs=None, outcome=None):
    return decision_record(
        actor=Actor.job("scaler"), kind=kind, subject_type=subject[0], subject=subject[1], reason=reason, at=at,
        inputs=inputs or {}, outcome=outcome or {},
    )  # fmt: skip


def order(kind, row, scale_out, *, warm=True, state="done", decision=None, ended=None, error=""):
    asked = {"policy": "demo/collocated", "decision": scale_out.pk, "warm": warm, "woken": False}
    return Action.objects.create(
        kind=kind, instance=row, state=state, actor_type="job", actor="scaler", params={"scale_out": asked},
        created_at=THEN, ended_at=ended, decision=decision, error=error,
    )  # fmt: skip


def scaled_out(*names):
    figures = {"load": 0.95, "upper": 0.8, "ready": 1}
    return decide("scale_out", "load_above_upper", inputs=figures, outcome={"started": list(names)})


@pytest.fixture
def taken(db):
    """From the warm pool: decided, its weights from another engine, its first token."""
    row = factories.instance(factories.served_model(name="demo"), id="warm-1")
    factories.instance(row.model, id="giver-1")
    out = scaled_out("warm-1")
    loaded = decide(
        "weights_load", "from_engine", subject=("instance", "warm-1"), at=after(3),
        inputs={"scale_out": out.pk}, outcome={"from": "giver-1", "load_s": 1.2, "ready_s": 1.5},
    )  # fmt: skip
    order("weights_load", row, out, decision=loaded, ended=after(3))
    served = decide(
        "scale_out_served", "warm", at=after(9), inputs={"instance": "warm-1", "scale_out": out.pk},
        outcome={"first_served_s": 2.5, "source": "engine", "load_s": 1.2, "from": "giver-1"},
    )  # fmt: skip
    order("first_served", row, out, decision=served, ended=after(9))
    return row, out, loaded, served


def address(row):
    return reverse("instance" if isinstance(row, Instance) else "decision", args=[row.pk])


def test_each_page_of_a_scale_out_links_to_the_others(viewer, live_store, taken):
    row, out, loaded, served = taken
    for page in (out, loaded, served, row):
        html = viewer.get(address(page)).content.decode()
        for other in (out, loaded, served, row):
            assert page == other or f'href="{address(other)}"' in html, (page, other)


def test_its_steps_stand_in_the_order_of_time_with_seconds_after_the_decision(taken):
    row, out, loaded, served = taken
    (way,) = ways_of(out)
    assert way == way_of(row, row.actions.all())
    assert ways_of(served) == ways_of(loaded) == [way]
    assert [(each.what, each.after_s) for each in way.steps] == [
        ("Decided", 0.0), ("Requested", 0.0), ("Weights loaded", 1.5), ("Ready", 1.5), ("First token", 2.5),
    ]  # fmt: skip


def test_of_a_new_process_what_has_not_come_is_said(viewer, live_store):
    row = factories.instance(factories.served_model(name="demo"), id="new-1", observed_state="starting")
    out = scaled_out("new-1")
    order("first_served", row, out, warm=False, state="running")
    steps = {each.what: each for each in way_of(row, row.actions.all()).steps}
    assert (steps["Requested"].text, steps["Ready"].text) == ("cold start: a new process", "not ready yet")
    assert (steps["First token"].at, steps["First token"].text) == (None, "no request served yet")
    inputs = {"since_desired_s": 8.0}
    up = decide("instance_ready", "healthy", subject=("instance", "new-1"), at=after(8), inputs=inputs)
    ready = {each.what: each for each in way_of(row, row.actions.all()).steps}["Ready"]
    assert (ready.after_s, ready.url) == (8.0, address(up))
    assert "new-1 is ready, 8.0 s after" in viewer.get(address(out)).content.decode()


def test_what_failed_is_said_with_its_error(viewer, live_store):
    model = factories.served_model(name="demo")
    gone = factories.instance(model, id="gone-1", observed_state="failed", error="exit code 1: no such folder")
    hollow = factories.instance(model, id="hollow-1")
    out = scaled_out("gone-1", "hollow-1")
    order("first_served", gone, out, warm=False, state="running")
    order("weights_load", hollow, out, state="failed", ended=after(5), error="disk: <b>not found</b>")
    html = viewer.get(address(out)).content.decode()
    assert "exit code 1: no such folder" in html
    assert "disk: &lt;b&gt;not found&lt;/b&gt;" in html
    assert [len([step for step in way.steps if step.failed]) for way in ways_of(out)] == [1, 1]


def test_a_scale_out_that_is_forgotten_breaks_no_page(viewer, live_store):
    row = factories.instance(factories.served_model(name="demo"), id="old-1")
    asked = {"policy": "demo/collocated", "decision": 999_999, "warm": True, "woken": False}
    Action.objects.create(
        kind="first_served", instance=row, state="running", actor_type="job", actor="scaler",
        params={"scale_out": asked}, created_at=THEN,
    )  # fmt: skip
    html = viewer.get(address(row)).content.decode()
    assert "Decision 999999 is no longer stored" in html
    assert "/audit/999999/" not in html
    served = decide("scale_out_served", "warm", inputs={"instance": "old-1", "scale_out": 999_999})
    assert "/audit/999999/" not in viewer.get(address(served)).content.decode()


def test_an_instance_of_no_scale_out_has_no_such_section(viewer, live_store):
    row = factories.instance()
    assert way_of(row, row.actions.all()) is None
    assert 'id="way-title"' not in viewer.get(address(row)).content.decode()


def test_only_what_is_an_instance_becomes_a_link(viewer, live_store):
    """A role is no instance, though one may have its name; nor is what is gone or only looks like a name."""
    factories.instance(id="decode")
    factories.instance(id="engine-1")
    turned = decide(
        "role_change", "demand_diverged", inputs={"instance": "engine-1", "from": "decode", "to": "prefill"},
        outcome={"started": ["engine-10", "engine-1", "<b>engine-1</b>"]},
    )  # fmt: skip
    html = viewer.get(address(turned)).content.decode()
    facts = html.split("<h2>Inputs</h2>")[1]
    assert set(re.findall(r'href="/fleet/instances/([^"]*?)/"', facts)) == {"engine-1"}
    assert f'<a href="{reverse("instance", args=["engine-1"])}">engine-1</a>' in facts
    assert reverse("instance", args=["decode"]) not in facts
    assert "<b>engine" not in html


def test_many_instances_cost_as_many_queries_as_one(viewer, live_store, django_assert_max_num_queries):
    model = factories.served_model(name="demo")
    rows = [factories.instance(model, id=f"new-{number}") for number in range(12)]
    out = scaled_out(*(row.pk for row in rows))
    for row in rows:
        order("first_served", row, out, warm=False, state="running")
    with django_assert_max_num_queries(12):
        assert viewer.get(address(out)).status_code == 200
