"""Scaling by hand on the page Scaling: the form, its banner with the reason, and the way back."""

from __future__ import annotations

from datetime import timedelta

import pytest
from django.urls import reverse
from django.utils import timezone

from controller.wording.scaling import why
from tests import factories


@pytest.fixture
def policy(db, live_store):
    return factories.scaling_policy(factories.served_model(name="llama"))


def hold(client, policy, **other):
    fields = {"instances": "3", "hours": "4.0", "reason": "a launch", "version": str(policy.version)}
    return client.post(reverse("scaling-hold", args=[policy.pk]), fields | other)


def release(client, policy):
    policy.refresh_from_db()
    return client.post(reverse("scaling-release", args=[policy.pk]), {"version": str(policy.version)})


def test_it_is_set_shown_with_its_reason_and_ended(operator, policy):
    assert hold(operator, policy).status_code == 302
    policy.refresh_from_db()
    assert (policy.held_instances, policy.held_for) == (3, "a launch")
    assert timedelta(hours=3.9) < policy.held_until - timezone.now() <= timedelta(hours=4)
    page = operator.get(reverse("scaling")).content.decode()
    assert "llama, collocated is set to 3 by hand." in page
    assert "Set to 3 instances by hand until" in page
    assert ": a launch</span>" in page
    assert "It is set to 3 until" in operator.get(reverse("scaling-hold", args=[policy.pk])).content.decode()
    assert release(operator, policy).status_code == 302
    policy.refresh_from_db()
    assert policy.held_instances is None
    page = operator.get(reverse("scaling")).content.decode()
    assert "is scaled by load again." in page
    assert "by hand until" not in page


def test_the_page_of_an_earlier_time_shows_what_was_set_then(operator, policy):
    hold(operator, policy)
    at = timezone.now()
    release(operator, policy)
    page = operator.get(reverse("scaling"), {"at": at.isoformat()}).content.decode()
    assert "Set to 3 instances by hand until" in page


@pytest.mark.parametrize(
    ("other", "message"),
    [
        ({"instances": "0"}, "Ensure this value is greater than or equal to 1."),
        ({"reason": ""}, "This field is required."),
        ({"hours": "99"}, "Select a valid choice."),
    ],
)
def test_what_is_wrong_is_told_at_its_field(operator, policy, other, message):
    answer = hold(operator, policy, **other)
    assert answer.status_code == 422
    assert message in answer.content.decode()
    policy.refresh_from_db()
    assert policy.held_instances is None


def test_somebody_else_s_change_is_told_first(operator, policy):
    hold(operator, policy)
    answer = hold(operator, policy, instances="5")
    assert answer.status_code == 412
    assert "was changed by someone else" in answer.content.decode()
    policy.refresh_from_db()
    assert policy.held_instances == 3
    assert hold(operator, policy, instances="5").status_code == 302


def test_what_somebody_else_set_meanwhile_is_not_ended_unseen(operator, policy):
    hold(operator, policy)
    policy.refresh_from_db()
    seen = policy.version
    hold(operator, policy, instances="5", reason="more of it")
    answer = operator.post(reverse("scaling-release", args=[policy.pk]), {"version": str(seen)})
    assert answer.status_code == 412
    page = answer.content.decode()
    assert "was changed by someone else" in page
    assert "Set to 5 until" in page
    policy.refresh_from_db()
    assert policy.held_instances == 5
    assert release(operator, policy).status_code == 302
    assert operator.post(reverse("scaling-release", args=[policy.pk])).status_code == 400


def test_a_disabled_policy_is_not_held(operator, policy):
    type(policy).objects.filter(pk=policy.pk).update(enabled=False)
    assert reverse("scaling-hold", args=[policy.pk]) not in operator.get(reverse("scaling")).content.decode()
    assert "This policy is disabled" in operator.get(reverse("scaling-hold", args=[policy.pk])).content.decode()
    answer = hold(operator, policy)
    assert answer.status_code == 422
    assert "The policy is disabled, so the scaler would not act on it." in answer.content.decode()


def test_viewers_see_it_and_cannot_change_it(viewer, operator, policy):
    hold(operator, policy)
    assert hold(viewer, policy).status_code == 403
    assert release(viewer, policy).status_code == 403
    page = viewer.get(reverse("scaling")).content.decode()
    assert "Set to 3 instances by hand until" in page
    assert reverse("scaling-hold", args=[policy.pk]) not in page


def test_what_updates_by_itself_has_no_form_that_would_lack_its_token(operator, policy):
    """The live part is rendered once for everybody."""
    hold(operator, policy)
    live = operator.get(reverse("scaling-live")).json()["html"]
    assert "Set to 3 instances by hand until" in live
    assert "<form" not in live
    page = operator.get(reverse("scaling-hold", args=[policy.pk])).content.decode()
    assert page.count("csrfmiddlewaretoken") >= 2


def test_the_control_api_does_the_same(operator, policy):
    address = f"/api/v1/scaling-policies/{policy.pk}/hold"
    body = {"instances": 2, "seconds": 600, "reason": "a drill"}
    answer = operator.post(address, body, content_type="application/json")
    assert (answer.status_code, answer.json()["held_instances"], answer.json()["held_for"]) == (200, 2, "a drill")
    wrong = operator.post(address, body | {"seconds": 5}, content_type="application/json")
    assert (wrong.status_code, set(wrong.json()["error"]["fields"])) == (400, {"seconds"})
    stale = operator.post(address, body | {"version": 1}, content_type="application/json")
    assert stale.status_code == 412
    assert operator.delete(address).json()["held_instances"] is None


def test_why_says_that_the_load_does_not_count(policy):
    sample = factories.scaling_sample(policy, load=0.95, ready=2, mind="at_max")
    assert why(policy, sample, 2) == "load 95 %, but the number of instances is set to 2 by hand"
    assert why(policy, sample, 4) == "load 95 %; the number of instances goes from 2 to 4, as set by hand"
    assert "the maximum of 4 instances is reached" in why(policy, sample)
