"""Commands to the queue: told to the gateways, answered, audited."""

from __future__ import annotations

import pytest

from controller.models import Decision
from controller.wording.sentences import sentence

CANCEL = {"kind": "cancel", "request": ["req-1", "req-2", "req-3"]}


def answer(**fields):
    return {"command": "c", "gateway": "g", "applied": [], "gone": [], "too_late": [], **fields}


def test_each_request_is_counted_once_over_all_gateways(operator, live_store):
    live_store.answers = [
        answer(applied=["req-1"], gone=["req-2", "req-3"]),
        answer(gone=["req-1", "req-3"], too_late=["req-2"]),
    ]
    said = operator.post("/queue/command/", CANCEL)
    assert said.status_code == 200
    assert said.json()["message"] == "1 cancelled, 1 already sent to an engine, 1 no longer in the queue."
    decision = Decision.objects.get(kind="queue_cancel")
    assert decision.inputs["request_ids"] == CANCEL["request"]
    assert decision.outcome == {
        "applied": ["req-1"],
        "too_late": ["req-2"],
        "gone": ["req-3"],
        "unanswered": [],
        "gateways": 2,
    }


def test_without_redis_nothing_is_claimed_and_the_try_is_audited(operator, live_store):
    live_store.away = True
    said = operator.post("/queue/command/", CANCEL)
    assert said.status_code == 503
    assert "No requests were cancelled" in said.json()["message"]
    assert "Redis is unavailable" in Decision.objects.get(kind="queue_cancel").outcome["error"]


def test_silence_of_every_gateway_is_said(operator, live_store):
    said = operator.post("/queue/command/", CANCEL)
    assert said.status_code == 503
    assert "No gateway answered" in said.json()["message"]


def test_what_waits_in_a_silent_gateway_is_not_called_gone(operator, live_store):
    live_store.answers, live_store.silent = [answer(applied=["req-1"], gone=["req-2", "req-3"])], 1
    said = operator.post("/queue/command/", CANCEL)
    assert said.status_code == 503
    assert said.json()["message"] == (
        "1 cancelled. Some gateways did not answer in time. No answer for 2 requests, which may have been "
        "cancelled, or may be within 5 seconds. Check the queue for the current state."
    )
    decision = Decision.objects.get(kind="queue_cancel")
    assert (decision.outcome["gone"], decision.outcome["unanswered"]) == ([], ["req-2", "req-3"])
    assert sentence(decision).endswith("cancelled 1 of 3 requests: 2 not acknowledged")


@pytest.mark.parametrize(
    "form", [{"kind": "explode", "request": ["a"]}, {"kind": "cancel"}, {"kind": "cancel", "request": ["x" * 65]}]
)
def test_nonsense_is_refused_before_any_gateway_hears_of_it(operator, live_store, form):
    assert operator.post("/queue/command/", form).status_code == 400
    assert live_store.commands == []


def test_a_viewer_cannot_cancel(viewer, live_store):
    assert viewer.post("/queue/command/", CANCEL).status_code == 403
    assert live_store.commands == []
    assert Decision.objects.get().kind == "access_refused"


@pytest.mark.parametrize(("kind", "done"), [("pause", "1 paused."), ("resume", "1 resumed.")])
def test_waiting_requests_are_paused_and_resumed(operator, live_store, kind, done):
    live_store.answers = [answer(applied=["req-1"])]
    said = operator.post("/queue/command/", {"kind": kind, "request": ["req-1"]})
    assert said.json()["message"] == done
    assert Decision.objects.get(kind=f"queue_{kind}").request_id == "req-1"


def test_a_new_priority_is_told_and_recorded(operator, live_store):
    live_store.answers = [answer(applied=["req-1"])]
    form = {"kind": "reprioritise", "request": ["req-1"], "priority": "3"}
    assert operator.post("/queue/command/", form).json()["message"] == "1 reprioritised."
    assert Decision.objects.get(kind="queue_reprioritise").inputs["priority"] == 3


@pytest.mark.parametrize("priority", ["", "-1", "high", "1001", "１", "²", "9" * 5000])
def test_a_priority_that_is_none_is_refused(operator, live_store, priority):
    form = {"kind": "reprioritise", "request": ["req-1"], "priority": priority}
    assert operator.post("/queue/command/", form).status_code == 400
    assert live_store.commands == []
