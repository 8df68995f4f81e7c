"""Requests that fail, are cancelled, or whose instance goes away: where the dispatcher sends them next."""

import pytest

from controller.core import events as ev
from controller.core.types import Load
from controller.dispatch import build_dispatcher
from tests.controller.dispatch.fleet import request, sends, up


def test_failure_before_the_first_token_goes_elsewhere():
    dispatcher = build_dispatcher("slackline")
    dispatcher.handle([up("a"), up("b")], 0.0)
    ((_, where),) = sends(dispatcher.handle([ev.Arrived(request("r"))], 0.0))
    retried = dispatcher.handle([ev.Failed("r", True, "refused")], 0.1)
    assert sends(retried) == [("r", "b" if where == "a" else "a")]
    again = dispatcher.handle([ev.Failed("r", True)], 0.2)
    assert sends(again)[0][0] == "r"
    given_up = dispatcher.handle([ev.Failed("r", True)], 0.3)
    assert given_up.actions[0].code == "no_capacity"


def test_a_second_retry_goes_where_it_has_not_failed_yet():
    dispatcher = build_dispatcher("slackline")
    dispatcher.handle([up("a"), up("b"), up("c")], 0.0)
    tried = [where for _, where in sends(dispatcher.handle([ev.Arrived(request("r", ttft=5.0))], 0.0))]
    for at in (0.1, 0.2):
        tried += [where for _, where in sends(dispatcher.handle([ev.Failed("r", True)], at))]
    assert sorted(tried) == ["a", "b", "c"]


def test_where_all_have_failed_it_only_the_last_one_is_left_alone_for_a_moment():
    dispatcher = build_dispatcher("slackline")
    dispatcher.handle([up("a"), ev.Arrived(request("r", ttft=5.0))], 0.0)
    waiting = dispatcher.handle([ev.Failed("r", True)], 0.1)
    assert sends(waiting) == []
    assert sends(dispatcher.handle([ev.Woke()], waiting.wake_at)) == [("r", "a")]


def test_a_hopeless_request_that_failed_a_moment_ago_holds_up_no_other():
    dispatcher = build_dispatcher("slackline", {"dispatch": {"refuse_infeasible": False}})
    dispatcher.handle([up("a", slots=1)], 0.0)
    dispatcher.handle([ev.Arrived(request("cheap", arrival=-5.0, output=1))], 0.0)
    dispatcher.handle([ev.Arrived(request("dear", arrival=-5.0, prompt=2000, output=100))], 0.0)
    assert dispatcher.queue().ids() == ["dear"]
    reply = dispatcher.handle([ev.Failed("cheap", True)], 0.1)
    assert sends(reply) == [("dear", "a")]


def test_a_retry_waits_for_a_replacement_when_its_only_instance_is_gone():
    dispatcher = build_dispatcher("slackline")
    dispatcher.handle([up("a"), ev.Arrived(request("r", wait=30.0))], 0.0)
    lost = dispatcher.handle([ev.InstanceDown("a"), ev.Failed("r", True, "connection reset")], 0.1)
    assert lost.actions == []
    assert lost.wake_at is not None
    assert sends(dispatcher.handle([up("b")], 3.0)) == [("r", "b")]


def branch(name="r", **fields):
    """Of its 2,000 tokens, 1,900 need not be computed at `a`."""
    return request(name, prompt=100, shared_tokens=1900, shared_at="a", **fields)


def test_a_branch_that_failed_where_its_kv_was_counts_elsewhere_with_all_of_its_prompt():
    dispatcher = build_dispatcher("slackline")
    asked = branch(wait=30.0)
    assert sends(dispatcher.handle([up("a"), up("b"), ev.Arrived(asked, frozenset({"b"}))], 0.0)) == [("r", "a")]
    assert dispatcher.lanes["m"].instances["a"].waiting_new == 100
    assert sends(dispatcher.handle([ev.Failed("r", True, "reset")], 0.1)) == [("r", "b")]
    assert dispatcher.lanes["m"].instances["b"].waiting_new == 2000
    assert (asked.prompt_tokens, asked.shared_tokens) == (2000, 0)
    dispatcher.handle([ev.Cancelled("r")], 0.2)
    assert dispatcher.lanes["m"].instances["b"].waiting_new == 0


def test_a_branch_that_finds_the_instance_of_its_kv_gone_counts_with_all_of_its_prompt():
    """It waited for a slot there, and another instance took its place."""
    dispatcher = build_dispatcher("slackline")
    dispatcher.handle([up("a", slots=1), ev.Arrived(request("other", output=100))], 0.0)
    assert sends(dispatcher.handle([ev.Arrived(branch(wait=30.0))], 0.1)) == []
    assert sends(dispatcher.handle([ev.InstanceDown("a"), up("b")], 0.2)) == [("r", "b")]
    assert dispatcher.lanes["m"].instances["b"].waiting_new == 2000
    assert dispatcher.queue().tokens == 0


def killed(at):
    """A request with a waiting time of 2 s is at `a`, which is killed; `b` has come meanwhile."""
    dispatcher = build_dispatcher("slackline")
    assert sends(dispatcher.handle([up("a"), ev.Arrived(request("r", ttft=9.0, wait=2.0))], 0.0)) == [("r", "a")]
    dispatcher.handle([up("b")], 0.1)
    return dispatcher, dispatcher.handle([ev.InstanceDown("a"), ev.Failed("r", True, "killed")], at)


@pytest.mark.parametrize("at", [2.0, 3.0])
def test_who_has_no_waiting_time_left_when_its_engine_is_killed_ends_there(at):
    """Decision 14: the waiting time bounds the queue, retries included; the first try does not stop its clock."""
    dispatcher, reply = killed(at)
    (dropped,) = reply.actions
    assert isinstance(dropped, ev.Drop)
    assert (dropped.decision.kind, dropped.decision.reason) == ("expire", "no_time_to_retry")
    assert dropped.decision.figures == {"attempts": 1, "error": "killed", "instance": "a"}
    assert (len(dispatcher.queue()), reply.wake_at) == (0, None)


def test_who_has_waiting_time_left_when_its_engine_is_killed_goes_elsewhere():
    assert sends(killed(1.9)[1]) == [("r", "b")]


def test_failure_after_the_first_token_is_the_drivers_to_tell():
    dispatcher = build_dispatcher("slackline")
    dispatcher.handle([up("a"), up("b"), ev.Arrived(request("r"))], 0.0)
    dispatcher.handle([ev.FirstToken("r")], 0.1)
    assert dispatcher.handle([ev.Failed("r", False)], 0.2).actions == []
    assert [f.running + f.waiting for f in dispatcher.fleet(0.2)] == [0, 0]


def test_cancel_aborts_what_was_sent_and_forgets_what_was_not():
    dispatcher = build_dispatcher("fcfs_window", {"pacing": {"window": 1}})
    dispatcher.handle([up(), ev.Arrived(request("a")), ev.Arrived(request("b"))], 0.0)
    assert dispatcher.handle([ev.Cancelled("b")], 0.1).actions == []
    assert dispatcher.handle([ev.Cancelled("a")], 0.1).actions == [ev.Abort("a", "w")]
    assert len(dispatcher.queue()) == 0


def test_draining_asleep_and_gone_instances_take_nothing():
    dispatcher = build_dispatcher("slackline")
    dispatcher.handle([up("a"), up("b")], 0.0)
    dispatcher.handle([ev.InstanceDraining("a"), ev.Telemetry("b", Load(0.0, awake=False))], 0.0)
    assert sends(dispatcher.handle([ev.Arrived(request("r"))], 0.0)) == []
    woken = dispatcher.handle([ev.Telemetry("b", Load(0.1))], 0.1)
    assert sends(woken) == [("r", "b")]
    dispatcher.handle([ev.InstanceDown("b")], 0.2)
    assert {f.id: f.state for f in dispatcher.fleet(0.2)} == {"a": "draining"}
