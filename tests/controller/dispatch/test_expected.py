"""Requests while no instance is there: held while one is on its way and their time allows, refused at once else."""

import math

import pytest

from controller.core import events as ev
from controller.core.types import Load
from controller.dispatch import build_dispatcher
from tests.controller.dispatch.fleet import kinds, request, sends, up


def refused(reply):
    return [(a.request.id, a.code, a.decision.reason) for a in reply.actions if isinstance(a, ev.Refuse)]


def test_held_while_an_instance_is_on_its_way_and_sent_when_it_is_there():
    dispatcher = build_dispatcher("slackline")
    reply = dispatcher.handle([ev.Expected("m", 0.0), ev.Arrived(request("a", wait=9.0))], 0.0)
    assert reply.actions == []
    assert reply.wake_at is not None
    assert sends(dispatcher.handle([up("w"), ev.Expected("m", math.inf)], 4.0)) == [("a", "w")]


def test_held_no_longer_than_the_waiting_time():
    dispatcher = build_dispatcher("slackline")
    dispatcher.handle([ev.Expected("m", 0.0), ev.Arrived(request("a", wait=2.0))], 0.0)
    reply = dispatcher.handle([ev.Woke()], 2.0)
    assert kinds(reply, ev.Drop) == ["a"]
    figures = reply.actions[0].decision.figures
    assert (figures["instances"], figures["instance_starting"]) == (0, True)


@pytest.mark.parametrize(
    ("asked", "held"),
    [({"wait": 9.0}, True), ({"wait": 3.0}, False), ({"wait": 0.0}, False), ({"wait": 60.0, "deadline": 4.0}, False)],
    ids=["time enough", "waiting time too short", "now or never", "deadline too near"],
)
def test_refused_at_once_when_it_cannot_start_in_time(asked, held):
    dispatcher = build_dispatcher("slackline")
    reply = dispatcher.handle([ev.Expected("m", 5.0), ev.Arrived(request("a", **asked))], 0.0)
    assert refused(reply) == ([] if held else [("a", "no_capacity", "starts_too_late")])
    if not held:
        assert reply.actions[0].retry_after_s == 5.0
        assert reply.actions[0].decision.figures["starts_in_s"] == 5.0


def test_refused_at_once_when_none_is_on_its_way_for_this_model():
    dispatcher = build_dispatcher("slackline")
    reply = dispatcher.handle([ev.Expected("other", 0.0), ev.Arrived(request("a"))], 0.0)
    assert refused(reply) == [("a", "no_capacity", "no_instance")]
    assert reply.actions[0].retry_after_s >= 1


def test_who_waited_for_an_instance_that_does_not_come_is_refused_then():
    dispatcher = build_dispatcher("slackline")
    dispatcher.handle([ev.Expected("m", 0.0), ev.Arrived(request("a")), ev.Arrived(request("b"))], 0.0)
    reply = dispatcher.handle([ev.Expected("m", math.inf)], 3.0)
    assert refused(reply) == [("a", "no_capacity", "no_instance"), ("b", "no_capacity", "no_instance")]
    assert reply.actions[0].decision.figures["waited_s"] == 3.0
    assert len(dispatcher.queue()) == 0
    assert reply.wake_at is None


def test_no_request_is_refused_while_an_instance_serves():
    dispatcher = build_dispatcher("slackline")
    dispatcher.handle([up("w", slots=1), ev.Expected("m", 0.0)], 0.0)
    dispatcher.handle([ev.Arrived(request("a")), ev.Arrived(request("b"))], 0.0)
    assert dispatcher.handle([ev.Expected("m", math.inf)], 0.1).actions == []
    assert len(dispatcher.queue()) == 1


def test_a_fleet_that_only_drains_serves_no_new_request_and_one_asleep_may_wake():
    dispatcher = build_dispatcher("slackline")
    dispatcher.handle([up("a"), up("b"), ev.InstanceDraining("a"), ev.Telemetry("b", Load(0.0, awake=False))], 0.0)
    assert dispatcher.handle([ev.Arrived(request("held"))], 0.0).actions == []
    dispatcher.handle([ev.Cancelled("held"), ev.InstanceDown("b")], 0.1)
    assert refused(dispatcher.handle([ev.Arrived(request("r", 0.2))], 0.2)) == [("r", "no_capacity", "no_instance")]


def test_what_waited_is_judged_by_the_speed_of_the_instance_that_came():
    """Without an instance nothing is known of its speed: the prediction is made again, and nobody stays given up."""
    dispatcher = build_dispatcher("slackline")
    dispatcher.handle([ev.Expected("m", 0.0), ev.Arrived(request("a", ttft=9.0, prompt=3000, wait=30.0))], 0.0)
    (before,) = [entry.cost.prefill_s for lane in dispatcher._fleet.lanes.values() for entry in lane.queue.entries()]
    reply = dispatcher.handle([up("w")], 2.0)
    assert sends(reply) == [("a", "w")]
    assert before != pytest.approx(0.31)  # SPEED: 0.01 + 3000 x 1e-4
    assert reply.actions[0].decision.reason == "fits_budget"


def test_one_instance_that_fails_is_not_asked_again_before_it_is_known_to_be_gone():
    dispatcher = build_dispatcher("slackline")
    dispatcher.handle([up("a"), ev.Arrived(request("r", wait=30.0))], 0.0)
    failed = dispatcher.handle([ev.Failed("r", True, "connection refused")], 0.01)
    assert failed.actions == []
    assert failed.wake_at == pytest.approx(0.51)
    assert dispatcher.handle([ev.InstanceDown("a"), ev.Expected("m", 0.02)], 0.02).actions == []
    assert sends(dispatcher.handle([up("b"), ev.Expected("m", math.inf)], 3.0)) == [("r", "b")]


def test_one_instance_that_only_stumbled_gets_the_request_again():
    dispatcher = build_dispatcher("slackline")
    dispatcher.handle([up("a"), ev.Arrived(request("r", wait=30.0))], 0.0)
    wake_at = dispatcher.handle([ev.Failed("r", True, "500")], 0.01).wake_at
    assert sends(dispatcher.handle([ev.Woke()], wake_at)) == [("r", "a")]


def test_the_last_that_takes_requests_gets_back_what_it_failed():
    dispatcher = build_dispatcher("slackline")
    dispatcher.handle([up("a"), ev.Arrived(request("r", wait=30.0))], 0.0)
    dispatcher.handle([up("b"), ev.InstanceDraining("b"), ev.Failed("r", True, "500")], 0.01)
    assert sends(dispatcher.handle([ev.Woke()], 0.6)) == [("r", "a")]
