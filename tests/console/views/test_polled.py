"""Fleet, one instance and Scaling fetch parts of themselves again: what these bring, how old it is, what it costs."""

from __future__ import annotations

import gzip
import json
import re
import time
from datetime import timedelta

import pytest
from django.db import OperationalError
from django.test import Client
from django.urls import reverse
from django.utils import timezone

from console.views import scaling as scaling_views
from console.views.fleet import instances as fleet_views
from controller.models import ScalingPolicy
from tests import factories
from tests.console.live.live_data import fleet, instance


def now_fleet(ago_s=0.0, **fields):
    """Of a gateway that speaks seldom: a busy machine may take seconds for a test."""
    return fleet(at=time.time() - ago_s, period_s=10.0, **fields)


def parts(html):
    return re.findall(r'data-part="(\w+)"', html)


def first_said(html):
    """What the page's script reads of its age before the first poll."""
    return json.loads(re.search(r'<script id="polled" type="application/json">(.*?)</script>', html)[1])


def test_a_part_brings_what_the_page_shows_with_its_age(viewer, live_store):
    row = factories.instance(id="engine-1")
    live_store.fleets = [now_fleet(1.0, instances=[instance(utilisation=0.42)])]
    for name, args, charts in (("fleet", [], None), ("instance", [row.pk], {"prefill", "decode"})):
        page = viewer.get(reverse(name, args=args)).content.decode()
        said = viewer.get(reverse(f"{name}-live", args=args), {"charts": 1}).json()
        assert parts(said["html"]) == parts(page)
        assert "42 %" in said["html"]
        assert 1 <= said["age_s"] < 30
        assert (said["stale_after_s"], said["reason"]) == (30.0, "")
        assert set(first_said(page)) == {"age_s", "stale_after_s", "reason"}
        assert set(said.get("charts", ())) == (charts or set())
    assert f'data-polled="{reverse("instance-live", args=[row.pk])}"' in page


def test_the_next_part_has_what_happened_meanwhile(operator, live_store):
    row = factories.instance(id="engine-1")
    live_store.fleets = [now_fleet(instances=[instance(running=2)])]
    before = operator.get(reverse("instance-live", args=[row.pk])).json()["html"]
    row.desired_state, row.version = "draining", row.version + 1
    row.save()
    live_store.fleets = [now_fleet(instances=[instance(running=7)])]
    after = operator.get(reverse("instance-live", args=[row.pk])).json()["html"]
    assert ("Cancel drain" in before, "Cancel drain" in after) == (False, True)
    assert "7<small>of" in after
    assert f'name="version" value="{row.version}"' in after


def test_charts_come_only_when_they_are_due(viewer, live_store):
    row = factories.instance()
    factories.scaling_sample(factories.scaling_policy(row.model))
    for name, args in (("instance-live", [row.pk]), ("scaling-live", [])):
        assert "charts" not in viewer.get(reverse(name, args=args)).json()
        assert viewer.get(reverse(name, args=args), {"charts": 1}).json()["charts"]


@pytest.mark.parametrize(("away", "reason"), [(True, "Redis is unavailable"), (False, "No gateway is reporting")])
def test_loads_that_no_one_reports_are_missing_and_that_is_said(viewer, live_store, away, reason):
    factories.instance(id="engine-1")
    live_store.away = away
    live_store.fleets = [fleet(at=time.time() - 60, instances=[instance(utilisation=0.42)])]
    said = viewer.get(reverse("fleet-live")).json()
    assert said["reason"].startswith(reason)
    assert "42 %" not in said["html"]
    assert "engine-1" in said["html"]
    assert first_said(viewer.get(reverse("fleet")).content.decode())["reason"] == said["reason"]


def test_a_scaler_that_does_not_look_is_said_with_its_age(viewer, live_store):
    policy = factories.scaling_policy()
    assert viewer.get(reverse("scaling-live")).json()["reason"] == "", "nobody could look at what was made just now"
    ScalingPolicy.objects.update(updated_at=timezone.now() - timedelta(hours=2))
    assert "has not run" in viewer.get(reverse("scaling-live")).json()["reason"]
    factories.scaling_sample(policy, 60)
    said = viewer.get(reverse("scaling-live")).json()
    assert said["reason"] == "The scaler is not running"
    assert said["age_s"] >= 60
    factories.scaling_sample(policy, 2)
    said = viewer.get(reverse("scaling-live")).json()
    assert (said["reason"], 2 <= said["age_s"] < 20) == ("", True)


def test_a_policy_that_is_off_or_looks_seldom_is_not_called_silent(viewer, live_store):
    factories.scaling_policy(enabled=False)
    assert viewer.get(reverse("scaling-live")).json()["reason"] == ""
    factories.scaling_sample(factories.scaling_policy(interval_s=60.0), 100)
    assert viewer.get(reverse("scaling-live")).json()["reason"] == ""


def test_only_who_may_act_gets_the_controls(signed_in, live_store):
    row = factories.instance()
    policy = factories.scaling_policy(row.model)
    for role, shown in (("viewer", False), ("operator", True)):
        client = signed_in(role)
        html = client.get(reverse("instance-live", args=[row.pk])).json()["html"]
        assert ("Drain" in html, "csrfmiddlewaretoken" in html) == (shown, shown)
        html = client.get(reverse("scaling-live")).json()["html"]
        edit = reverse("scaling-edit", args=[policy.pk])
        assert (f'href="{edit}"' in html) is shown


def test_what_a_script_can_tell_apart(viewer, live_store, monkeypatch):
    """A session that ended, an instance that is gone, a database that is away."""
    row = factories.instance()
    assert Client().get(reverse("instance-live", args=[row.pk])).status_code == 302
    assert viewer.get(reverse("instance-live", args=["nobody"])).status_code == 404

    def away(*_args):
        raise OperationalError("the connection is closed")

    monkeypatch.setattr(fleet_views, "fleet_context", away)
    answer = viewer.get(reverse("fleet-live"), headers={"accept": "application/json"})
    assert answer.status_code == 503
    assert answer.json()["message"].startswith("The database is unavailable")


def test_names_are_escaped_in_parts(viewer, live_store):
    row = factories.instance(error="<img src=x onerror=alert(1)>")
    assert "<img" not in viewer.get(reverse("instance-live", args=[row.pk])).json()["html"]
    assert "<img" not in viewer.get(reverse("fleet-live")).json()["html"]


def test_what_can_come_and_go_has_a_key_that_stays(viewer, live_store):
    """By which the script finds a row again, whatever came in front of it."""
    row = factories.instance(id="engine-1")
    policy = factories.scaling_policy(row.model)
    html = viewer.get(reverse("fleet-live")).json()["html"]
    assert html.count('data-key="engine-1"') == 2, "its cell and its row"
    scaling = viewer.get(reverse("scaling-live")).json()["html"]
    assert f'data-key="policy-{policy.pk}"' in scaling
    assert f'data-chart="policy-{policy.pk}" data-kept' in scaling


def test_two_hundred_instances_cost_few_queries_and_one_rendering(
    viewer, live_store, django_assert_max_num_queries, django_assert_num_queries, monkeypatch
):
    model = factories.served_model()
    hosts = [factories.host() for _ in range(25)]
    rows = [factories.instance(model=model, host=hosts[number % 25]) for number in range(200)]
    for number in range(3):
        factories.scaling_sample(factories.scaling_policy(factories.served_model(name=f"m{number}")))
    live_store.fleets = [now_fleet(instances=[instance(id=row.pk) for row in rows])]
    for address in (
        reverse("fleet-live"),
        reverse("scaling-live") + "?charts=1",
        reverse("instance-live", args=[rows[0].pk]) + "?charts=1",
    ):
        with django_assert_max_num_queries(12):
            viewer.get(address)
    for kept in (fleet_views.POLLED, *scaling_views.POLLED.values()):
        monkeypatch.setattr(kept, "kept_s", 60.0)
    for address in (reverse("fleet-live"), reverse("scaling-live")):
        first = viewer.get(address).json()["html"]
        with django_assert_num_queries(3):  # session, user and role: what was made is given again
            assert viewer.get(address).json()["html"] == first


def test_a_large_part_is_compressed_for_those_who_ask(viewer, live_store):
    rows = [factories.instance() for _ in range(20)]
    factories.scaling_policy(rows[0].model)
    for name in ("fleet-live", "scaling-live"):
        plain = viewer.get(reverse(name))
        packed = viewer.get(reverse(name), headers={"accept-encoding": "gzip"})
        assert packed["content-encoding"] == "gzip"
        assert json.loads(gzip.decompress(packed.content))["html"] == plain.json()["html"]
        assert len(packed.content) < len(plain.content) / 2
