"""From a class that misses to what caused it: the decisions that bear on it, and what surrounded one request."""

from __future__ import annotations

import html
from datetime import UTC, datetime, timedelta

import pytest
from django.db import connection
from django.urls import reverse
from django.utils import timezone

from controller.models import ScalingSample
from controller.selectors.records.causes import traffic
from controller.services.actors import Actor
from controller.services.decisions import decision_record
from controller.services.fleet.scaling_policies import scaling_policy_update
from controller.services.records.requests import records_write
from tests import factories
from tests.console.views.test_audit import body

SCALER = Actor.job("scaler")
OTHER_MODEL = "elsewhere"
EXPIRED = {
    "kind": "expire", "reason": "waiting_time", "at": 5.0,
    "rejected": {"engine-1": "48 outstanding, 0 tokens waiting"},
    "figures": {"waited_s": 5.0, "hopeless": True, "paused": False, "instances": 4, "outstanding": 48, "queued": 9},
}  # fmt: skip


def stored(*rows):
    connection.ensure_connection()
    records_write(connection=connection.connection, records=rows)


def scaled(kind, reason, at, model="demo", **inputs):
    known = {"load": 2.0, "upper": 0.8, "lower": 0.3, "ready": 4, "max_instances": 4, "min_instances": 1, **inputs}
    return decision_record(
        actor=SCALER, kind=kind, subject_type="scaling_policy", subject=f"{model}/collocated", reason=reason,
        inputs=known, at=at,
    )  # fmt: skip


def refused(at, **by_class):
    counts = {name.replace("_", "/", 1): number for name, number in by_class.items()}
    total = sum(counts.values())
    figures = {"requests": total, "seconds": 10.0, "by_code": {"waiting_time_exceeded": total}, "by_class": counts}
    return decision_record(
        actor=Actor.gateway("gateway-1"), kind="refusals", subject_type="gateway", subject="gateway-1",
        reason="waiting_time_exceeded", inputs=figures, at=at,
    )  # fmt: skip


@pytest.fixture
def burst(db):
    """Half an hour ago four instances, which are the limit, were too few: one of many expired requests of acme."""
    now = timezone.now().replace(microsecond=0)
    at = now - timedelta(minutes=30)
    model = factories.served_model(name="demo")
    policy = factories.scaling_policy(model, max_instances=4)
    type(policy).objects.update(updated_at=at - timedelta(days=1))
    factories.instance(model, id="engine-1")
    factories.instance(factories.served_model(name=OTHER_MODEL), id="engine-9")
    common = {"slo_class": "interactive", "tenant": "acme", "model": "demo"}
    stored(
        factories.record(
            id="req-lost", arrived_at=at.timestamp(), outcome="expired", attained=False, ttft_met=False, queue_s=None,
            ttft_s=None, tpot_s=None, e2e_s=5.0, instance="", decisions=[EXPIRED], **common,
        ),
        factories.record(arrived_at=at.timestamp(), slo_class="batch", tenant="acme", model=OTHER_MODEL),
    )  # fmt: skip
    ScalingSample.objects.create(
        policy=policy, at=at + timedelta(seconds=2), load=2.0, ready=4, starting=0, draining=0, mind="at_max"
    )
    return at, policy


def kinds(answer):
    return sorted((decision.kind, decision.subject) for decision, _ in answer.context["rows"])


def test_the_decisions_of_a_class_are_those_that_explain_its_misses(viewer, burst):
    at, _ = burst
    second = timedelta(seconds=1)
    refused(at + 7 * second, acme_interactive=330, acme_batch=2)
    refused(at + 9 * second, acme_batch=5)
    refused(at + 9 * second, other_interactive=5)
    scaled("scale_hold", "at_max", at + 1 * second)
    scaled("scale_out", "load_above_upper", at + 2 * second, ready=1)
    scaled("scale_hold", "at_max", at, model=OTHER_MODEL)
    scaled("scale_in", "load_below_lower", at - timedelta(hours=3), low_for_s=15.0, instance="engine-5")
    for kind, subject in (("instance_unreachable", "engine-1"), ("instance_unreachable", "engine-9")):
        decision_record(
            actor=SCALER, kind=kind, subject_type="instance", subject=subject, reason="no_answer",
            inputs={"url": "http://e"}, at=at + 3 * second,
        )  # fmt: skip
    for subject in ("interactive", "batch"):
        decision_record(
            actor=factories.ACTOR, kind="slo_class_updated", subject_type="slo_class", subject=subject,
            reason="person_updated", at=at,
        )  # fmt: skip
    answer = viewer.get(reverse("audit"), {"tenant": "acme", "slo_class": "interactive"}, follow=True)
    assert kinds(answer) == [
        ("instance_unreachable", "engine-1"),
        ("refusals", "gateway-1"),
        ("scale_hold", "demo/collocated"),
        ("scale_out", "demo/collocated"),
        ("slo_class_updated", "interactive"),
    ]
    shown = html.unescape(answer.content.decode())
    assert "did not serve 332 requests in 10 s: timed out in the queue" in shown
    assert "330 of them interactive" in shown
    assert "cannot scale out demo/collocated: load 200 %, but the maximum of 4 is reached" in shown
    assert [decision.kind for decision, _ in answer.context["in_force"]] == ["scale_in"], "held on from before"
    assert {kind: count for kind, count, _ in answer.context["kinds"]}["scale_hold"] == 1
    (hold,) = [url for kind, _, url in answer.context["kinds"] if kind == "scale_hold"]
    assert kinds(viewer.get(hold)) == [("scale_hold", "demo/collocated")]


def test_the_list_begins_an_hour_before_the_newest_miss_and_its_address_says_so(viewer, burst):
    at, _ = burst
    answer = viewer.get(reverse("audit"), {"tenant": "acme", "slo_class": "interactive"})
    assert answer.status_code == 302
    minute = (at - timedelta(hours=1)).strftime("%Y-%m-%dT%H:%M")
    assert f"since={minute.replace(':', '%3A')}" in answer["location"]
    calm = viewer.get(reverse("audit"), {"tenant": "acme", "slo_class": "batch"})["location"]
    assert "since=" in calm, "without a miss: the last hour"


def test_an_address_means_the_same_a_day_after_the_traffic_has_stopped(burst):
    at, _ = burst
    asked = {"tenant": "acme", "slo_class": "interactive", "since": at - timedelta(hours=1)}
    now, later = (traffic(**asked, until=at + timedelta(hours=hours)) for hours in (1, 30))
    assert later == now
    assert later.models == ("demo",)


def test_what_is_asked_of_all_tenants_or_of_all_classes(viewer, burst):
    at, _ = burst
    refused(at, acme_interactive=3)
    refused(at, other_interactive=4)
    scaled("scale_hold", "at_max", at, model=OTHER_MODEL)
    since = (at - timedelta(minutes=1)).strftime("%Y-%m-%dT%H:%M")
    of_class = viewer.get(reverse("audit"), {"slo_class": "interactive", "since": since})
    assert kinds(of_class) == [("refusals", "gateway-1")], "only what had requests in that time"
    of_tenant = viewer.get(reverse("audit"), {"tenant": "acme", "since": since})
    assert kinds(of_tenant) == [("refusals", "gateway-1"), ("scale_hold", f"{OTHER_MODEL}/collocated")]
    nobody = viewer.get(reverse("audit"), {"tenant": "nobody", "slo_class": "(none)", "since": since})
    assert kinds(nobody) == []
    assert b"scaling is not included" in nobody.content


@pytest.mark.django_db(transaction=True)
def test_the_export_has_the_same_rows(viewer, burst):
    at, _ = burst
    refused(at, acme_interactive=3)
    refused(at, other_batch=4)
    asked = {"tenant": "acme", "slo_class": "interactive", "since": at.strftime("%Y-%m-%dT%H:%M"), "format": "csv"}
    lines = body(viewer.get(reverse("audit-export"), asked)).strip().splitlines()
    assert len(lines) == 2
    assert "acme/interactive" in lines[1]


def test_a_missed_request_says_why_and_leads_to_the_fix(operator, burst):
    at, policy = burst
    slo_class = factories.slo_class(name="interactive")
    scaled("scale_hold", "at_max", at + timedelta(seconds=1))
    scaled("scale_out", "load_above_upper", at - timedelta(hours=5), ready=3)
    refused(at + timedelta(seconds=8), acme_interactive=330)
    scaled("scale_hold", "at_max", at, model=OTHER_MODEL)
    answer = operator.get(reverse("request", args=["req-lost"]))
    shown = html.unescape(answer.content.decode())
    assert "Why it missed" in shown
    assert "It timed out after 5.00 s in the queue: all 4 available instances were busy, with 48 requests" in shown
    assert (
        "load 200 % is above 80 %, but the maximum of 4 instances is reached. 4 ready, 0 starting, 0 draining." in shown
    )
    ended = (at + timedelta(seconds=5)).astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%S")
    assert answer.context["whole"]["around"].scaling_url == f"/scaling/?at={ended.replace(':', '%3A')}"
    for address in (
        reverse("scaling-edit", args=[policy.pk]), reverse("class-edit", args=[slo_class.pk]),
        answer.context["whole"]["around"].decisions_url, answer.context["whole"]["around"].scaling_url,
        reverse("instance", args=["engine-1"]),
    ):  # fmt: skip
        assert f'href="{address}"' in shown
        assert operator.get(address).status_code == 200
    around = [decision.kind for decision, _ in answer.context["whole"]["around"].decisions]
    assert around == ["scale_out", "scale_hold", "refusals"], "in the order of time, the last one from before first"
    assert "330 of them interactive" in shown


def test_the_fix_does_not_rewrite_what_caused_the_miss(operator, burst):
    """After the limit was raised the page still says which limit stood in the way."""
    _, policy = burst
    policy.refresh_from_db()
    scaling_policy_update(
        actor=factories.ACTOR, policy_id=policy.pk, version=policy.version, changes={"max_instances": 6}
    )
    shown = operator.get(reverse("request", args=["req-lost"])).content.decode()
    assert "but the maximum of 4 instances is reached" in shown
    assert "6 instances" not in shown


def test_a_viewer_is_led_to_histories_and_to_no_form(viewer, burst):
    slo_class = factories.slo_class(name="interactive")
    shown = viewer.get(reverse("request", args=["req-lost"])).content.decode()
    assert "Edit policy" not in shown
    assert reverse("class-history", args=[slo_class.pk]) in shown
    assert reverse("class-edit", args=[slo_class.pk]) + '"' not in shown


def test_a_tenants_own_class_is_the_one_that_is_meant(viewer, burst):
    factories.slo_class(name="interactive")
    own = factories.slo_class(name="interactive", tenant=factories.tenant(name="acme"))
    factories.slo_class(name="interactive", tenant=factories.tenant(name="zeta"))
    shown = viewer.get(reverse("request", args=["req-lost"]))
    assert shown.context["whole"]["around"].slo_class == own


def test_what_is_not_on_record_is_said_and_not_guessed(viewer, burst):
    ScalingSample.objects.all().delete()
    assert b"The scaler of demo, " in viewer.get(reverse("request", args=["req-lost"])).content
    burst[1].delete()
    shown = viewer.get(reverse("request", args=["req-lost"])).content
    assert b"No scaling policy for demo exists now" in shown
    assert b"No related decisions" in shown


def test_one_that_attained_has_its_surroundings_and_no_excuse(viewer, burst):
    stored(factories.record(id="req-fine", arrived_at=burst[0].timestamp()))
    shown = viewer.get(reverse("request", args=["req-fine"])).content.decode()
    assert "Context" in shown
    assert "Why it missed" not in shown
    assert reverse("instance", args=["engine-1"]) in shown


def test_from_a_decision_to_what_it_was_about(viewer, operator, burst):
    at, policy = burst
    hold = scaled("scale_hold", "at_max", at)
    shown = operator.get(reverse("decision", args=[hold.pk])).content.decode()
    assert reverse("scaling-edit", args=[policy.pk]) in shown
    assert "Scaling at this time" in shown
    assert "Edit policy" not in viewer.get(reverse("decision", args=[hold.pk])).content.decode()
    batch = refused(at + timedelta(seconds=8), acme_interactive=330)
    (lead,) = viewer.get(reverse("decision", args=[batch.pk])).context["leads"]
    assert lead[0] == "Misses of interactive · acme up to then"
    assert "req-lost" in viewer.get(lead[1]).content.decode()
    gone = scaled("scale_hold", "at_max", at, model="forgotten")
    assert operator.get(reverse("decision", args=[gone.pk])).context["policy"] is None


def test_pages_of_causes_cost_at_most_ten_queries(operator, burst, django_assert_max_num_queries):
    """In the dearest case: the policy was changed since, the class is there, and so are commands and batches."""
    at, policy = burst
    factories.slo_class(name="interactive")
    policy.refresh_from_db()
    scaling_policy_update(actor=factories.ACTOR, policy_id=policy.pk, version=policy.version, changes={"upper": 0.9})
    hold = scaled("scale_hold", "at_max", at)
    for number in range(30):
        refused(at + timedelta(seconds=number), acme_interactive=330)
    since = datetime.fromtimestamp(at.timestamp() - 60, tz=UTC).strftime("%Y-%m-%dT%H:%M")
    about = f"{reverse('audit')}?tenant=acme&slo_class=interactive"
    for address in (
        reverse("request", args=["req-lost"]), about, f"{about}&since={since}", reverse("decision", args=[hold.pk]),
    ):  # fmt: skip
        with django_assert_max_num_queries(10):
            assert operator.get(address).status_code in (200, 302)
