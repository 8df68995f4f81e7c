"""Scaling: the line against its thresholds, why it did not scale, starts by source, and the editor."""

from __future__ import annotations

import re
import time
from datetime import timedelta

import pytest
from django.core.exceptions import ValidationError
from django.urls import reverse
from django.utils import timezone

from console.views import scaling as views
from controller.models import Decision, Device, Instance, InstanceDevice, ScalingPolicy, ScalingSample
from controller.selectors.fleet import scaling
from controller.services.actors import Actor
from controller.services.decisions import decision_record
from controller.services.fleet.scaling import samples_retain
from controller.services.fleet.scaling_stages import stage_of
from controller.wording.scaling import why
from tests import factories


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"load": 0.5}, "is between 30 % and 80 %"),
        ({"load": 0.1, "low_for_s": 4.0}, "has been below 30 % for 4 s; after 15 s"),
        (
            {"load": 0.1, "low_for_s": 20.0, "start_s": 41.7},
            "below 30 % for 20 s; after 42 s, the time a start takes, one instance is removed",
        ),
        ({"load": 0.1, "low_for_s": 4.0, "start_s": 3.0}, "for 4 s; after 15 s one instance is removed"),
        (
            {"load": 1.7, "mind": "settling", "starting": 1, "start_s": 41.7},
            "1 starting (a start takes about 42 s), 0 draining",
        ),
        ({"load": 0.1, "ready": 1}, "1 is the minimum"),
        ({"load": 1.7, "mind": "at_max"}, "the maximum of 4 instances is reached"),
        ({"load": 1.7, "mind": "settling", "starting": 1, "cooldown_left_s": 6.0}, "6 s of cooldown left, 1 starting"),
        (
            {"load": 0.1, "mind": "at_max"},
            "10 % is no longer above 80 %; while it was, the maximum of 4 instances was reached",
        ),
        (
            {"load": 0.5, "mind": "settling"},
            "is between 30 % and 80 % again; before that, the last change had not settled",
        ),
        ({"load": 0.1, "mind": "settling", "draining": 1}, "calls for a change, but the last one has not settled"),
        ({"load": None, "mind": "telemetry_stale"}, "the telemetry is stale"),
        ({"load": None, "mind": "at_max"}, "unbounded load (requests arrive and none finish) is above 80 %, but"),
        ({"load": 0.2, "mind": "needed_for_targets"}, "but each instance that could be stopped is the only one"),
        ({"load": 0.2, "mind": "rest_would_exceed_upper"}, "with one instance fewer it would rise above 80 %"),
        (
            {"load": 0.02, "ready": 1, "mind": "rest_would_exceed_upper"},
            "load 2 % is low, but requests arrive and no instance would be left to serve them",
        ),
        ({"load": 1.2}, "the scaler acted in this evaluation"),
        ({"load": None}, "requests arrive and none finish"),
        ({"load": 0.0, "ready": 0}, "no instance is up; load 0 % is below 30 %, but"),
        ({"load": 1.7, "ready": 0, "mind": "no_device"}, "no instance is up; another instance is needed"),
    ],
)
def test_why_it_did_not_scale(db, fields, said):
    policy = factories.scaling_policy()
    assert said in why(policy, factories.scaling_sample(policy, **fields))


def test_a_limit_of_one_is_said_in_the_singular(db):
    policy = factories.scaling_policy(max_instances=1)
    assert why(policy, factories.scaling_sample(policy, load=1.7, mind="at_max")).endswith(
        "but the maximum of 1 instance is reached"
    )


def test_a_policy_that_is_off_says_so(db):
    policy = factories.scaling_policy(enabled=False)
    assert why(policy, factories.scaling_sample(policy, load=9.0)) == "the policy is disabled"


def test_the_page_draws_the_line_and_what_was_done(viewer, live_store):
    policy = factories.scaling_policy(factories.served_model(name="demo"))
    factories.scaling_sample(policy, 20, load=0.9)
    factories.scaling_sample(policy, 10, load=0.4)
    decision_record(
        actor=Actor.job("scaler"), kind="scale_out", subject_type="scaling_policy", subject="demo/collocated",
        reason="load_above_upper", inputs={"load": 0.9, "upper": 0.8, "ready": 2}, outcome={"started": ["engine-x"]},
    )  # fmt: skip
    answer = viewer.get(reverse("scaling"))
    (card,) = answer.context["cards"]
    traces = {trace["key"]: trace for trace in card["chart"]["traces"]}
    assert traces["load"]["y"] == [0.9, 0.4]
    assert [line["y"] for line in card["chart"]["layout"]["lines"]] == [0.8, 0.3]
    assert "scaled out demo/collocated" in traces["scale_out"]["text"][0]
    html = answer.content.decode()
    assert "load 40 % is between" in html
    assert reverse("instance", args=["engine-x"]) in html


def shown_of(html):
    """The words of a policy's facts, by their name, and what is said above them."""
    words = {"said": re.search(r'class="why-now">(.*?)</p>', html, re.DOTALL)[1]}
    words |= dict(re.findall(r"<div><dt>(.*?)</dt><dd>(.*?)</dd>", html, re.DOTALL))
    return {name: " ".join(re.sub(r"<[^>]+>", "", text).split()) for name, text in words.items()}


def test_a_policy_that_is_off_shows_nothing_of_its_last_look_as_now(viewer, live_store):
    """Both instances have been stopped since."""
    policy = factories.scaling_policy(enabled=False)
    for _ in range(2):
        factories.instance(policy.model, desired_state="stopped", observed_state="stopped")
    factories.scaling_sample(policy, 3, load=0.04, ready=2)
    shown = shown_of(viewer.get(reverse("scaling")).content.decode())
    assert (shown["Ready, starting, draining"], shown["Load now"]) == ("0, 0, 0", "– not evaluated")
    assert shown["said"].startswith("This policy is disabled and not evaluated. Last evaluated ")
    assert shown["said"].endswith(": load 4 %, 2 ready, 0 starting, 0 draining.")


def test_a_scaler_that_has_fallen_silent_shows_nothing_of_its_last_look_as_now(viewer, live_store):
    policy = factories.scaling_policy()
    factories.scaling_sample(policy, 60, load=0.5, ready=2)
    shown = shown_of(viewer.get(reverse("scaling")).content.decode())
    assert shown["Load now"] == "– not evaluated"
    assert shown["said"].startswith("The scaler is not evaluating this policy, so its current load is unknown.")
    factories.scaling_sample(policy, 1, load=0.5, ready=2)
    shown = shown_of(viewer.get(reverse("scaling")).content.decode())
    assert shown["Load now"] == "50 % of capacity"
    assert shown["said"].startswith("Now: load 50 % is between")


def test_instances_are_counted_as_they_are_now_and_as_the_scaler_counts_them(db, live_store):
    policy = factories.scaling_policy(warm=1)
    for fields in (
        {}, {}, {"observed_state": "starting"}, {"weights": "loading"}, {"desired_state": "draining"},
        {"weights": "absent"}, {"weights": "asleep", "sleep_level": 1}, {"weights": "leaving"},
        {"observed_state": "unreachable"}, {"observed_state": "failed"}, {"desired_state": "stopped"},
        {"role": "prefill"},
    ):  # fmt: skip
        factories.instance(policy.model, **{"observed_state": "ready", **fields})
    factories.instance(observed_state="ready")
    counted = scaling.instances_now()[policy.model_id, "collocated"]
    assert counted == (2, 2, 1)
    seen = stage_of(policy, [], time.time()).seen
    assert counted == tuple(len(seen.having(state)) for state in ("ready", "starting", "draining"))


def test_each_event_of_the_hour_is_on_the_chart_and_the_newest_are_listed(viewer, live_store):
    policy = factories.scaling_policy(factories.served_model(name="demo"))
    factories.scaling_sample(policy, 3000)
    factories.scaling_sample(policy, 1)
    for number in range(60):
        decision_record(
            actor=Actor.job("scaler"), kind="scale_out", subject_type="scaling_policy", subject="demo/collocated",
            reason="load_above_upper", inputs={"load": 0.9, "upper": 0.8, "ready": 2}, outcome={},
            at=timezone.now() - timedelta(seconds=50 * number + 1),
        )  # fmt: skip
    answer = viewer.get(reverse("scaling"))
    traces = {trace["key"]: trace for trace in answer.context["cards"][0]["chart"]["traces"]}
    assert (len(traces["scale_out"]["x"]), len(answer.context["events"])) == (60, 12)
    assert None in traces["load"]["y"], "no line where nobody looked"


def test_the_page_stays_within_ten_queries(viewer, live_store, django_assert_max_num_queries):
    for _ in range(4):
        policy = factories.scaling_policy()
        factories.instance(policy.model)
        factories.scaling_sample(policy, 1)
    with django_assert_max_num_queries(10):
        assert viewer.get(reverse("scaling")).status_code == 200


def test_old_samples_go(db):
    policy = factories.scaling_policy()
    factories.scaling_sample(policy, 8 * 86_400)
    kept = factories.scaling_sample(policy, 6 * 86_400)
    assert samples_retain(days=7) == 1
    assert ScalingSample.objects.get() == kept


def fields(**changed):
    given = {
        "enabled": "on", "min_instances": 1, "max_instances": 4, "upper": 80, "lower": 30, "sustain_s": 15,
        "cooldown_s": 10, "interval_s": 1, "warm": 0,
    }  # fmt: skip
    return {**given, **changed}


def test_how_many_are_kept_warm_may_be_left_to_the_devices(operator, live_store):
    policy = factories.scaling_policy(warm=2)
    edit = reverse("scaling-edit", args=[policy.pk])
    assert operator.post(edit, fields(warm="", version=policy.version)).status_code == 302
    policy.refresh_from_db()
    assert policy.warm is None
    assert b"as free devices allow" in operator.get(reverse("scaling")).content


def warm_spares(viewer):
    return shown_of(viewer.get(reverse("scaling")).content.decode())["Warm spares"]


def test_the_warm_pool_is_shown_as_observed_and_not_as_desired(viewer, live_store):
    policy, host = factories.scaling_policy(warm=1), factories.host()
    assert warm_spares(viewer) == "0 of 1: there is no managed instance to start a copy of"
    serving = factories.instance(policy.model, host=host, device_kind="gpu")
    assert warm_spares(viewer) == "0 of 1", "nobody knows of devices there: nothing stands in the way"
    first, second = (
        Device.objects.create(host=host, index=index, kind="gpu", memory_bytes=2**30) for index in range(2)
    )
    Device.objects.create(host=host, index=2, kind="cpu", memory_bytes=2**30)
    InstanceDevice.objects.create(instance=serving, device=first)
    assert warm_spares(viewer) == "0 of 1", "one is free: it is about to start"
    InstanceDevice.objects.create(instance=factories.instance(), device=second)
    assert warm_spares(viewer) == "0 of 1: no device is free"
    warm = factories.instance(policy.model, weights="absent", observed_state="starting")
    assert warm_spares(viewer) == "0 of 1, 1 starting"
    Instance.objects.filter(pk=warm.pk).update(observed_state="ready")
    assert warm_spares(viewer) == "1 of 1"


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"warm": 0}, "none"),
        ({"warm": None}, "0; as many as free devices allow"),
        ({"warm": 2, "enabled": False}, "0 of 2: the policy is disabled"),
    ],
)
def test_a_pool_that_is_not_wanted_or_not_kept_up_says_so(viewer, live_store, fields, said):
    factories.scaling_policy(**fields)
    assert warm_spares(viewer) == said


def test_of_a_moment_only_the_desired_pool_is_known(viewer, live_store):
    factories.scaling_policy(warm=1)
    html = viewer.get(reverse("scaling"), {"at": "2020-01-01T00:00"}).content.decode()
    assert html.split("<dt>Warm spares</dt><dd>")[1].split("</dd>")[0] == "1 required"


def test_policies_without_a_pool_cost_no_more_queries_with_more_of_them(
    viewer, live_store, django_assert_max_num_queries
):
    host = factories.host()
    device = Device.objects.create(host=host, index=0, kind="gpu", memory_bytes=2**30)
    for number in range(6):
        policy = factories.scaling_policy(warm=1)
        row = factories.instance(policy.model, host=host, device_kind="gpu")
        if not number:
            InstanceDevice.objects.create(instance=row, device=device)
    with django_assert_max_num_queries(13):
        html = viewer.get(reverse("scaling")).content.decode()
    assert html.count("0 of 1: no device is free") == 6


def test_a_policy_is_made_and_changed(operator, live_store):
    model = factories.served_model()
    answer = operator.post(reverse("scaling-new"), fields(model=model.pk, role="collocated", max_instances=3))
    assert answer.status_code == 302
    policy = ScalingPolicy.objects.get(model=model)
    edit = reverse("scaling-edit", args=[policy.pk])
    assert operator.post(edit, fields(upper=90, version=policy.version)).status_code == 302
    policy.refresh_from_db()
    assert (policy.upper, policy.max_instances) == (0.9, 4)
    assert Decision.objects.filter(kind="scaling_policy_updated").count() == 1
    conflict = operator.post(edit, fields(upper=70, version=1))
    assert conflict.status_code == 412
    assert b"was changed by someone else" in conflict.content
    again = operator.post(reverse("scaling-new"), fields(model=model.pk, role="collocated"))
    assert again.status_code == 422


def test_a_second_policy_of_a_role_is_marked_in_the_words_of_the_form(operator, live_store):
    model = factories.scaling_policy(factories.served_model(name="demo"), role="prefill").model
    answer = operator.post(reverse("scaling-new"), fields(model=model.pk, role="prefill"))
    assert answer.status_code == 422
    html = answer.content.decode()
    assert "demo already has a policy for this role." in html.split('id="id_role_error"')[1].split("</ul>")[0]
    assert "Correct the marked fields" in html
    assert operator.post(reverse("scaling-new"), fields(model=model.pk, role="decode")).status_code == 302


def test_where_no_field_is_marked_no_one_is_sent_to_one(operator, live_store, monkeypatch):
    def refuse(**fields):
        raise ValidationError("Two of you at once.")

    monkeypatch.setattr(views, "scaling_policy_create", refuse)
    answer = operator.post(reverse("scaling-new"), fields(model=factories.served_model().pk, role="collocated"))
    assert answer.status_code == 422
    html = answer.content.decode()
    assert "Two of you at once." in html
    assert "Not saved." in html
    assert "Correct the marked fields" not in html


def test_a_change_of_a_policy_has_its_history_and_a_way_back(operator, live_store):
    policy = factories.scaling_policy()
    edit = reverse("scaling-edit", args=[policy.pk])
    assert operator.post(edit, fields(upper=90, version=policy.version)).status_code == 302
    changed = Decision.objects.get(kind="scaling_policy_updated")
    answer = operator.get(reverse("scaling-history", args=[policy.pk]))
    (change,) = answer.context["changes"]
    assert (change["decision"], [each.name for each in change["fields"]]) == (changed, ["upper"])
    assert change["revert_url"] in answer.content.decode()
    form = operator.get(change["revert_url"]).context["form"]
    assert form["upper"].value() == "80", "shown, and saved only when somebody says so"
    policy.refresh_from_db()
    assert policy.upper == 0.9


@pytest.mark.parametrize(
    ("changed", "field"),
    [
        ({"min_instances": 5}, "max_instances"),
        ({"lower": 90}, "lower"),
        ({"interval_s": 0}, "interval_s"),
        ({"upper": "nan"}, "upper"),
        ({"max_instances": 100_000}, "max_instances"),
    ],
)
def test_wrong_values_name_their_field(operator, changed, field):
    policy = factories.scaling_policy()
    answer = operator.post(reverse("scaling-edit", args=[policy.pk]), fields(version=1, **changed))
    assert answer.status_code == 422
    assert field in answer.context["form"].errors


def test_a_viewer_changes_nothing(viewer):
    policy = factories.scaling_policy()
    assert viewer.post(reverse("scaling-edit", args=[policy.pk]), fields(version=1)).status_code == 403


def test_a_scale_out_from_the_warm_pool_is_told_to_its_end(viewer, live_store):
    row = factories.instance(id="warm-1")
    subject = f"{row.model.name}/collocated"
    factories.scaling_policy(row.model, warm=1)
    for kind, reason, inputs, outcome in (
        ("scale_warm", "pool_below_target", {"warm": 0, "wanted": 1}, {"started": ["warm-1"]}),
        ("role_change", "demand_diverged", {"instance": "warm-1", "from": "decode", "to": "prefill"}, {}),
        (
            "scale_out_served",
            "warm",
            {"instance": "warm-1"},
            {"first_served_s": 1.75, "source": "engine", "load_s": 0.9},
        ),
    ):
        decision_record(
            actor=Actor.job("scaler"), kind=kind, subject_type="scaling_policy", subject=subject, reason=reason,
            inputs=inputs, outcome=outcome,
        )  # fmt: skip
    page = viewer.get(reverse("scaling")).content.decode()
    assert "first token 1.8 s after the request to start (warm spare, weights from engine in 0.9 s)" in page
    assert "switches warm-1 from decode to prefill" in page
    assert "is adding warm spares for" in page
