"""Orders of the coordinator: what is pruned is served last, comes back, and never stays so by mistake."""

import math
from dataclasses import replace

import orjson
import pytest

from controller.core import events as ev
from controller.core.pruning import report_from_json, report_to_json
from controller.core.types import LatencyCoefficients
from controller.dispatch import Scheduler, build_dispatcher
from controller.dispatch.event_log import EventRecorder, Log
from controller.dispatch.queue_report import queue_report
from tests.controller.dispatch.fleet import request, up


@pytest.fixture
def dispatcher():
    """Three requests wait behind one slot."""
    made = build_dispatcher(
        "slackline",
        {"ordering": {"name": "earliest_deadline_first"}, "pacing": {"name": "fixed_window", "window": 1}},
    )
    made.handle([up(slots=1), ev.Arrived(request("first"))], 0.0)
    made.handle([ev.Arrived(request(name, ttft=5.0 + i)) for i, name in enumerate("abc")], 0.0)
    return made


def orders(sequence, *names, expires_at=10.0):
    figures = ("w", 1.0)
    return ev.Orders(sequence, expires_at, dict.fromkeys(names, figures))


def of_kind(reply, kind):
    return [each for each in reply.actions if isinstance(each, kind)]


def reasons(reply):
    return [(each.decision.kind, each.decision.subject, each.decision.reason) for each in of_kind(reply, ev.Prune)]


def hopeless(dispatcher):
    return [row for row in dispatcher.queue().ids() if dispatcher.queue().row(row)["hopeless"]]


def test_a_pruned_request_is_served_last(dispatcher):
    reply = dispatcher.handle([orders(1, "a")], 0.1)
    assert reasons(reply) == [("prune", "a", "others_in_time")]
    assert reply.actions[0].decision.figures == {"instance": "w", "behind_s": 1.0}
    assert dispatcher.queue().ids() == ["b", "c", "a"]
    sent = []
    for done in ("first", "b", "c"):
        sent += dispatcher.handle([ev.Finished(done, 10)], 0.2).actions
    assert [(each.request.id, each.decision.reason) for each in sent] == [
        ("b", "fits_budget"), ("c", "fits_budget"), ("a", "pruned_spare_budget"),
    ]  # fmt: skip


def test_it_comes_back_once_orders_do_not_name_it(dispatcher):
    dispatcher.handle([orders(1, "a", "b")], 0.1)
    reply = dispatcher.handle([orders(2, "b")], 0.2)
    assert reasons(reply) == [("unprune", "a", "room_again")]
    assert dispatcher.queue().ids() == ["a", "c", "b"]


def test_expired_orders_end_by_themselves(dispatcher):
    reply = dispatcher.handle([orders(1, "a", expires_at=3.0)], 0.1)
    assert reply.wake_at == 3.0
    reply = dispatcher.handle([ev.Woke()], 3.0)
    assert reasons(reply) == [("unprune", "a", "orders_expired")]
    assert dispatcher.queue().ids() == ["a", "b", "c"]
    assert not dispatcher.orders.in_force
    assert dispatcher.orders.taken["expired"] == 1


def test_late_orders_and_orders_out_of_sequence_change_nothing(dispatcher):
    assert reasons(dispatcher.handle([orders(1, "a", expires_at=0.1)], 0.1)) == []
    dispatcher.handle([orders(5, "a")], 0.1)
    for sequence in (4, 5):
        assert reasons(dispatcher.handle([orders(sequence, "b")], 0.2)) == []
    assert dispatcher.queue().ids() == ["b", "c", "a"]
    assert dispatcher.orders.taken == {"taken": 1, "late": 1, "out_of_sequence": 2}


def test_a_new_count_begins_once_the_old_orders_have_expired(dispatcher):
    """Redis lost its data, so the coordinator counts from 1 again."""
    dispatcher.handle([orders(90, "a", expires_at=3.0)], 0.1)
    dispatcher.handle([ev.Woke()], 3.0)
    assert reasons(dispatcher.handle([orders(1, "b")], 3.1)) == [("prune", "b", "others_in_time")]


def test_a_forced_request_is_exempt(dispatcher):
    force = ev.Command("k", "ann", "reprioritise", ("a",), 0)
    dispatcher.handle([force], 0.1)
    assert reasons(dispatcher.handle([orders(1, "a")], 0.1)) == []
    assert dispatcher.queue().ids()[0] == "a"


def test_forcing_a_pruned_request_brings_it_back(dispatcher):
    dispatcher.handle([orders(1, "a")], 0.1)
    dispatcher.handle([ev.Command("k", "ann", "reprioritise", ("a",), 0)], 0.2)
    assert dispatcher.queue().ids()[0] == "a"
    assert hopeless(dispatcher) == []


def test_one_that_cannot_make_it_any_more_stays_last(dispatcher):
    dispatcher.handle([orders(1, "a")], 0.1)
    dispatcher.handle([orders(2, expires_at=50.0)], 30.0)
    assert "a" in hopeless(dispatcher)


def test_orders_for_requests_that_left_do_no_harm(dispatcher):
    dispatcher.handle([orders(1, "a", "nobody")], 0.1)
    dispatcher.handle([ev.Cancelled("a")], 0.2)
    assert reasons(dispatcher.handle([orders(2)], 0.3)) == []


def test_one_that_was_sent_and_came_back_is_pruned_again(dispatcher):
    dispatcher.handle([orders(1, "a")], 0.1)
    dispatcher.handle([ev.Cancelled("a")], 0.2)  # it left the queue, as when it is sent
    dispatcher.handle([ev.Arrived(request("a", ttft=5.0))], 0.3)
    assert reasons(dispatcher.handle([orders(2, "a")], 0.4)) == [("prune", "a", "others_in_time")]
    assert reasons(dispatcher.handle([orders(3, "a")], 0.5)) == []
    assert reasons(dispatcher.handle([orders(4)], 0.6)) == [("unprune", "a", "room_again")]


def test_pruned_is_not_refused(dispatcher):
    """It keeps its waiting time, and its record says that it was pruned."""
    dispatcher.handle([orders(1, "a", expires_at=math.inf)], 0.1)
    (drop,) = [each for each in of_kind(dispatcher.handle([ev.Woke()], 61.0), ev.Drop) if each.request.id == "a"]
    assert drop.decision.figures["pruned"] is True


def test_the_report_names_what_waits(dispatcher):
    dispatcher.handle([orders(1, "a"), ev.Command("k", "ann", "reprioritise", ("c",), 0)], 0.1)
    report = queue_report(Scheduler(dispatcher), "gw", 0.2, clock_s=1000.0)
    (queue,) = report.queues
    assert report.at == 1000.2
    assert [(row.id, row.exempt) for row in queue.waiting] == [("a", False), ("c", True), ("b", False)]
    assert queue.waiting[0].due == pytest.approx(1004.95)
    assert [unit.id for unit in queue.units] == ["w"]
    assert queue.units[0].backlog_s > 0


@pytest.mark.parametrize(
    ("latency", "busy"),
    [(None, False), (LatencyCoefficients(0.05, 1e-4, 0.0, 0.3, 0.003, 0.0), True)],  # steps longer than the TPOT
)
@pytest.mark.parametrize("slots", [1, 8, 256])
def test_a_report_of_any_fleet_can_be_read_again(latency, busy, slots):
    """Nothing profiled, or decodes that leave no time to prefills: such an instance has a rate of zero."""
    made = build_dispatcher("slackline", {"pacing": {"name": "fixed_window", "window": 1}})
    spec = replace(up(slots=slots).spec, latency=latency)
    made.handle([ev.InstanceUp(spec), ev.Arrived(request("first"))], 0.0)
    made.handle([ev.FirstToken("first"), *(ev.Arrived(request(name)) for name in "abc")], 0.1)
    report = queue_report(Scheduler(made), "gw", 0.2)
    assert report_from_json(orjson.loads(orjson.dumps(report_to_json(report)))) == report
    assert (report.queues[0].units[0].prefill_rate == 0.0) is busy


def test_paused_requests_are_not_reported(dispatcher):
    dispatcher.handle([ev.Command("k", "ann", "pause", ("b",))], 0.1)
    (queue,) = queue_report(Scheduler(dispatcher), "gw", 0.2).queues
    assert [row.id for row in queue.waiting] == ["a", "c"]


def test_a_scheduler_log_has_orders_and_what_they_did(dispatcher):
    """Read back they are the events that came, so that a replay prunes the same requests."""
    sent, recorder = [orders(1, "a", "b")], EventRecorder()
    written = recorder.events(sent)
    lines = [recorder.header("slackline", {}), recorder.line(0.1, written, dispatcher.handle(sent, 0.1))]
    (batch,) = Log(lines).batches()
    (read,) = batch.events
    assert read._replace(scavengers={name: tuple(why) for name, why in read.scavengers.items()}) == sent[0]
    assert [(name, each["request"]) for name, each in batch.actions if name == "Prune"] != []
    fresh = build_dispatcher("slackline", {"pacing": {"name": "fixed_window", "window": 1}})
    fresh.handle([up(slots=1), ev.Arrived(request("first")), ev.Arrived(request("a", ttft=5.0))], 0.0)
    assert reasons(fresh.handle(batch.events, 0.1)) == [("prune", "a", "others_in_time")]
