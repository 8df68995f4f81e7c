"""Scaling at a moment: what the scaler did and was told around it, and by which policy it is judged."""

from __future__ import annotations

from datetime import timedelta

from django.urls import reverse
from django.utils import timezone

from controller.models import Action, Instance, ScalingSample
from controller.services.actors import Actor
from controller.services.decisions import decision_record
from tests import factories
from tests.console.views.test_scaling import fields


def test_a_moment_is_answered_from_the_record_near_it(viewer, live_store):
    policy = factories.scaling_policy()
    then = factories.scaling_sample(policy, 3600, mind="at_max", load=2.0)
    asked = (then.at + timedelta(seconds=5)).strftime("%Y-%m-%dT%H:%M:%S")
    assert b"the maximum of 4 instances is reached" in viewer.get(reverse("scaling"), {"at": asked}).content
    assert b"Nothing was recorded near" in viewer.get(reverse("scaling"), {"at": "2020-01-01T00:00"}).content
    assert viewer.get(reverse("scaling"), {"at": "noon"}).status_code == 422


def test_the_look_that_scaled_lies_within_the_second_that_the_address_names(viewer, live_store):
    policy = factories.scaling_policy()
    second = timezone.now().replace(microsecond=0) - timedelta(minutes=5)
    for after, load in ((timedelta(seconds=-4), 0.4), (timedelta(milliseconds=400), 1.2)):
        ScalingSample.objects.create(
            policy=policy, at=second + after, load=load, ready=2, starting=0, draining=0, mind="steady"
        )
    (card,) = viewer.get(reverse("scaling"), {"at": second.strftime("%Y-%m-%dT%H:%M:%S")}).context["cards"]
    assert card["why_then"] == "load 120 % is above 80 %: the scaler acted in this evaluation"


def test_a_moment_without_a_record_shows_dashes_and_no_empty_figures(viewer, live_store):
    factories.scaling_policy()
    html = viewer.get(reverse("scaling"), {"at": "2020-01-01T00:00"}).content.decode()
    figures = html.split("<dt>Ready, starting, draining</dt><dd>")[1].split("</dd>")[0]
    assert figures == "–"
    assert html.split("<dt>Load then</dt><dd>")[1].split("</dd>")[0] == "–"
    assert "2020-01-01 00:00:00 UTC" in html


def test_a_moment_is_judged_by_the_policy_as_it_was_then(operator, live_store):
    """After the limit was raised the hold of before must not read as if the new one had been the limit."""
    policy = factories.scaling_policy(max_instances=2)
    then = factories.scaling_sample(policy, 60, mind="at_max", load=2.0)
    for version, changes in ((1, {"max_instances": 6}), (2, {"max_instances": 6, "upper": 90}), (3, {"upper": 70})):
        given = fields(**{"max_instances": 6, "version": version, **changes})
        assert operator.post(reverse("scaling-edit", args=[policy.pk]), given).status_code == 302
    answer = operator.get(reverse("scaling"), {"at": then.at.strftime("%Y-%m-%dT%H:%M:%S.%f")})
    (card,) = answer.context["cards"]
    assert "load 200 % is above 80 %, but the maximum of 2 instances is reached" in answer.content.decode()
    assert card["chart"]["layout"]["lines"][0]["y"] == 0.8
    assert operator.get(reverse("scaling")).context["cards"][0]["policy"].max_instances == 6


def test_the_page_of_a_moment_costs_no_more_queries_with_more_policies(
    viewer, live_store, django_assert_max_num_queries
):
    for _ in range(12):
        factories.scaling_sample(factories.scaling_policy(), 60, mind="at_max")
    at = (timezone.now() - timedelta(seconds=50)).strftime("%Y-%m-%dT%H:%M:%S")
    with django_assert_max_num_queries(10):
        answer = viewer.get(reverse("scaling"), {"at": at})
    assert len(answer.context["cards"]) == 12
    assert all(card["then"] for card in answer.context["cards"])


def test_the_hour_around_a_moment_is_shown_with_what_was_done_then(viewer, live_store):
    policy = factories.scaling_policy(factories.served_model(name="demo"))
    then = timezone.now() - timedelta(hours=5)
    for ago_s, load in ((5 * 3600 + 5, 0.9), (5 * 3600, 0.4), (10, 0.1)):
        factories.scaling_sample(policy, ago_s, load=load)
    decision_record(
        actor=Actor.job("scaler"), kind="scale_out", subject_type="scaling_policy", subject="demo/collocated",
        reason="load_above_upper", inputs={"load": 0.9, "upper": 0.8, "ready": 2}, at=then,
        outcome={"started": ["engine-x"]},
    )  # fmt: skip
    answer = viewer.get(reverse("scaling"), {"at": then.strftime("%Y-%m-%dT%H:%M")})
    (card,) = answer.context["cards"]
    traces = {trace["key"]: trace for trace in card["chart"]["traces"]}
    assert traces["load"]["y"] == [0.9, 0.4], "the hour around it, not the last one"
    assert "scaled out demo/collocated" in traces["scale_out"]["text"][0]
    assert "engine-x" in answer.content.decode()
    (now,) = viewer.get(reverse("scaling")).context["cards"]
    assert {trace["key"]: trace for trace in now["chart"]["traces"]}["load"]["y"] == [0.1]


def done_at(at, kind="scale_hold", reason="settling"):
    return decision_record(
        actor=Actor.job("scaler"), kind=kind, subject_type="scaling_policy", subject="demo/collocated",
        reason=reason, inputs={"load": 0.9, "upper": 0.8, "ready": 2}, outcome={}, at=at,
    )  # fmt: skip


def test_what_was_asked_about_is_listed_however_much_came_later(viewer, live_store):
    """A busy quarter of an hour after it must not push it out."""
    factories.scaling_policy(factories.served_model(name="demo"))
    then = timezone.now().replace(microsecond=0) - timedelta(minutes=13)
    asked = done_at(then + timedelta(milliseconds=400), "scale_out", "load_above_upper")
    before = [done_at(then - timedelta(seconds=10 * number)) for number in range(1, 6)]
    for number in range(1, 71):
        done_at(then + timedelta(seconds=10 * number))
    answer = viewer.get(reverse("scaling"), {"at": then.strftime("%Y-%m-%dT%H:%M:%S")})
    shown = [decision for decision, _, _ in answer.context["events"]]
    assert len(shown) == 40
    assert shown == sorted(shown, key=lambda each: each.at), "in the order of time"
    assert {asked.pk, *(each.pk for each in before)} <= {each.pk for each in shown}
    html = answer.content.decode()
    rows = html.split('id="events-title"')[1]
    assert rows.index("the chosen time") < rows.index(reverse("decision", args=[asked.pk]))
    assert rows.index("the chosen time") > rows.index(reverse("decision", args=[before[0].pk]))


def test_the_desired_state_of_that_time_is_shown_not_that_of_now(viewer, live_store):
    model = factories.scaling_policy().model
    then = timezone.now() - timedelta(hours=3)
    for number in range(30):
        factories.instance(model, id=f"new-{number}")
    for name, ago in (("that-time", then), ("later-by-ten", then + timedelta(minutes=10))):
        factories.instance(model, id=name)
        Instance.objects.filter(pk=name).update(created_at=ago)
    answer = viewer.get(reverse("scaling"), {"at": then.strftime("%Y-%m-%dT%H:%M:%S")})
    assert [each.id for each in answer.context["starts"]] == ["that-time", "later-by-ten"]
    assert "the 2 starts closest to this time" in answer.content.decode()
    empty = viewer.get(reverse("scaling"), {"at": "2020-01-01T00:00"}).content.decode()
    assert "No instances started around this time" in empty


def test_an_instance_taken_at_that_time_was_desired_then_though_it_is_older_and_was_taken_again(viewer, live_store):
    row, then = factories.instance(id="warm-1"), timezone.now() - timedelta(hours=3)
    Instance.objects.filter(pk=row.pk).update(created_at=then - timedelta(days=1))
    for at in (then, then + timedelta(hours=2)):
        Action.objects.create(
            kind=Action.Kind.WEIGHTS_LOAD, instance=row, state=Action.State.DONE, actor_type="job", actor="scaler",
            params={"scale_out": {"warm": True}}, created_at=at, ended_at=at + timedelta(seconds=4),
        )  # fmt: skip
    (start,) = viewer.get(reverse("scaling"), {"at": then.isoformat()}).context["starts"]
    assert (start.id, start.desired_at, start.ready_s) == ("warm-1", then, 4.0)
