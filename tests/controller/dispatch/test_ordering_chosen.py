"""Another ordering while requests wait: all of them are ranked anew, and a log replays it."""

from __future__ import annotations

import json

import pytest

from controller.core import events as ev
from controller.core.errors import ConfigError, UnknownName
from controller.core.policy import ORDERINGS
from controller.dispatch import build_dispatcher
from controller.dispatch import queue as queue_module
from controller.dispatch.event_log import Encoder, EventDecoder
from controller.dispatch.lane import GO_ON_S, TOLD_EACH_PASS
from controller.dispatch.policy_sets import (
    MOST_OPTION,
    check_frames,
    checked_ordering,
    ordering_of,
    ordering_options,
    with_ordering,
)
from controller.policies.ordering.calm import CUTOFFS
from tests.controller.dispatch.fleet import request, sends, up

ARRIVED = ("late", "soon", "first")  # in this order; by deadline in the other


@pytest.fixture
def dispatcher():
    """Three requests wait behind one slot, in order of arrival."""
    made = build_dispatcher(
        "slackline",
        {"ordering": {"name": "first_come_first_served"}, "pacing": {"name": "fixed_window", "window": 1}},
    )
    made.handle([up(slots=1), ev.Arrived(request("runs"))], 0.0)
    for index, name in enumerate(ARRIVED):
        made.handle([ev.Arrived(request(name, arrival=0.1 * index, ttft=20.0 - 5 * index))], 0.1 * index)
    return made


def waiting(dispatcher):
    return dispatcher.queue().ids()


def test_what_waits_is_ranked_anew_and_back(dispatcher):
    assert waiting(dispatcher) == list(ARRIVED)
    dispatcher.handle([ev.OrderingChosen("earliest_deadline_first")], 1.0)
    assert (waiting(dispatcher), dispatcher.ordering) == (list(reversed(ARRIVED)), "earliest_deadline_first")
    dispatcher.handle([ev.OrderingChosen("")], 1.1)
    assert (waiting(dispatcher), dispatcher.ordering) == (list(ARRIVED), "first_come_first_served")


def test_what_an_operator_moved_and_paused_stays_so(dispatcher):
    moved = ev.Command("c1", "olga", "reprioritise", ("late",), priority=5)
    dispatcher.handle([moved, ev.Command("c2", "olga", "pause", ("first",))], 0.9)
    dispatcher.handle([ev.OrderingChosen("earliest_deadline_first")], 1.0)
    assert waiting(dispatcher) == ["soon", "late", "first"]
    assert dispatcher.queue().row("first")["paused"]


def test_frames_know_where_what_waited_before_may_not_go(dispatcher):
    dispatcher.handle([ev.Arrived(request("failed", arrival=0.5), frozenset({"w"}))], 0.5)
    dispatcher.handle([ev.OrderingChosen("calm")], 1.0)
    queue = dispatcher.lanes["m"].queue
    assert set(queue._failed) == {"failed"}
    assert [name for _, name in queue._by_context] == sorted(name for _, name in queue._by_context)
    assert len(queue._by_context) == 4
    dispatcher.handle([ev.OrderingChosen("")], 1.1)
    assert (queue._failed, queue._by_context) == ({}, [])


def crowded(waiting):
    made = build_dispatcher(
        "slackline",
        {"ordering": {"name": "first_come_first_served"}, "pacing": {"name": "fixed_window", "window": 1}},
    )
    made.handle([up(slots=1), ev.Arrived(request("runs"))], 0.0)
    made.handle([ev.Arrived(request(f"r{at}", 0.1, 90.0 - 7 * at % 31, output=10 + at % 50)) for at in waiting], 0.1)
    return made


@pytest.mark.parametrize("name", sorted(ORDERINGS))
def test_a_long_queue_is_sorted_at_once(name, monkeypatch):
    dispatcher = crowded(range(300))
    queue, ordering = dispatcher.lanes["m"].queue, dispatcher._orderings(name, {})
    monkeypatch.setattr(queue_module, "insort", lambda *args, **more: pytest.fail("one by one"))
    queue.order_by(ordering, 0.2)
    assert (len(queue), len(queue.ready)) == (300, 300)
    assert [key for key, _ in queue.ready] == sorted(entry.key for _, entry in queue.ready)


def test_frames_are_told_of_a_long_queue_over_several_passes():
    """Of what left, was paused or moved meanwhile they are not told; what failed in between is."""
    dispatcher = crowded(range(5 * TOLD_EACH_PASS))
    queue = dispatcher.lanes["m"].queue
    reply = dispatcher.handle([ev.OrderingChosen("calm")], 0.2)
    told = [entry.request.id for _, entry in queue.ready][:TOLD_EACH_PASS]
    assert [*queue.frames._seqs] == told
    gone, paused, moved = (entry.request.id for _, entry in queue.ready[-3:])
    pause = ev.Command("c1", "olga", "pause", (paused,))
    move = ev.Command("c2", "olga", "reprioritise", (moved,), priority=5)
    reply = dispatcher.handle([ev.Cancelled(gone), pause, move], 0.2005)
    passes = 2
    while queue.untold:
        before = len(queue.frames._seqs)
        assert reply.wake_at == pytest.approx(dispatcher._now + GO_ON_S)
        reply = dispatcher.handle([], reply.wake_at)
        assert len(queue.frames._seqs) <= before + TOLD_EACH_PASS
        passes += 1
    assert passes == 5
    assert set(queue.frames._seqs) == {entry.request.id for _, entry in queue.ready} - {moved}
    assert len(queue.frames._seqs) == 5 * TOLD_EACH_PASS - 3


def test_requests_are_sent_while_frames_are_told_of_others():
    count = 4 * TOLD_EACH_PASS
    dispatcher = crowded(range(count))
    dispatcher.handle([ev.OrderingChosen("calm")], 0.2)
    done, sent = "runs", []
    for step in range(count):
        reply = dispatcher.handle([ev.FirstToken(done), ev.Finished(done, 10)], 0.2 + 0.001 * (step + 1))
        (done,) = (each.request.id for each in reply.actions if isinstance(each, ev.Send))
        sent.append(done)
    assert len(set(sent)) == count


def test_another_ordering_ends_what_frames_are_told():
    dispatcher = crowded(range(3 * TOLD_EACH_PASS))
    queue = dispatcher.lanes["m"].queue
    dispatcher.handle([ev.OrderingChosen("calm")], 0.2)
    assert queue.untold
    dispatcher.handle([ev.OrderingChosen("earliest_deadline_first")], 0.2)
    assert not queue.untold


@pytest.mark.parametrize("name", sorted(ORDERINGS))
def test_from_and_to_each_ordering_nothing_is_lost(dispatcher, name):
    dispatcher.handle([ev.OrderingChosen(name)], 1.0)
    dispatcher.handle([ev.Arrived(request("new", arrival=1.1))], 1.1)
    dispatcher.handle([ev.OrderingChosen("calm")], 1.2)
    dispatcher.handle([ev.OrderingChosen(name)], 1.3)
    sent = []
    done = "runs"
    for step in range(4):
        reply = dispatcher.handle([ev.Finished(done, 10)], 1.4 + 0.1 * step)
        (done,) = (each.request.id for each in reply.actions if isinstance(each, ev.Send))
        sent.append(done)
    assert sorted(sent) == ["first", "late", "new", "soon"]


def test_a_log_has_it():
    chosen = ev.OrderingChosen("calm", '{"frame_steps": 100}')
    assert EventDecoder().events(Encoder().named([chosen])) == [chosen]


@pytest.mark.parametrize(
    ("name", "options", "field"),
    [
        ("calm", {"frame_steps": 0}, "frame_steps"),
        ("calm", {"frame_steps": "many"}, "ordering.frame_steps"),
        ("calm", {"keep": MOST_OPTION + 1}, "ordering.keep"),
        ("learned_rank", {"error": 1e5}, "error"),
        ("earliest_deadline_first", {"window": 3}, "ordering.window"),
    ],
)
def test_options_that_are_wrong_are_named(name, options, field):
    with pytest.raises(ConfigError) as raised:
        checked_ordering(name, options)
    assert raised.value.field == field


def test_an_unknown_name_and_the_options_of_all():
    with pytest.raises(UnknownName):
        checked_ordering("alphabetical", {})
    assert ordering_options()["calm"]["frame_steps"] == 50
    assert set(ordering_options()) == set(ORDERINGS)


def test_an_ordering_takes_the_place_of_that_of_the_overrides_with_options_of_its_own():
    started = {"ordering": {"name": "calm", "copies": 2}, "dispatch": {"scan_limit": 4}}
    assert with_ordering(started, "", {}) == started
    assert ordering_of("slackline", started) == ("calm", {**ordering_options()["calm"], "copies": 2})
    chosen = with_ordering(started, "calm", {"frame_steps": 9})
    assert chosen["dispatch"] == {"scan_limit": 4}
    assert ordering_of("slackline", chosen) == ("calm", {**ordering_options()["calm"], "frame_steps": 9})
    assert ordering_of("slackline", {})[0] == "feasible_deadlines"
    with pytest.raises(UnknownName):
        ordering_of("slackline", {"ordering": {"name": "by_colour"}})
    with pytest.raises(ConfigError, match="no setting 'window'"):
        ordering_of("slackline", {"ordering": {"window": 1}})


def frames_of(dispatcher):
    return dispatcher.lanes["m"].queue.frames


def learned_frames():
    """Requests wait for 100 seconds, one is served every two of them, and a frame takes less. The first value of the
    cutoff has had its epoch of 40 frames."""
    one_by_one = {"ordering": {"name": "calm"}, "pacing": {"name": "fixed_window", "window": 1}}
    dispatcher = build_dispatcher("slackline", one_by_one)
    arrivals = [ev.Arrived(request(f"r{number}", ttft=1e5, wait=1e6)) for number in range(60)]
    reply = dispatcher.handle([up(slots=1), *arrivals], 0.0)
    for second in range(2, 102, 2):
        ((sent, _),) = sends(reply)
        reply = dispatcher.handle([ev.FirstToken(sent), ev.Finished(sent, 10)], float(second))
    frames = frames_of(dispatcher)
    assert frames.cutoff == CUTOFFS[1]
    return dispatcher.frames_state(100.0)["m"], frames


@pytest.mark.parametrize("ordering", ["calm", ""])
def test_frames_go_on_from_an_earlier_process(dispatcher, ordering):
    state, before = learned_frames()
    learned = ev.FramesLearned("m", "calm", state, 1.0)
    (sent,) = EventDecoder().events(json.loads(json.dumps(Encoder().named([learned]))))
    dispatcher.handle([ev.OrderingChosen(ordering), sent], 1.0)
    if not ordering:
        assert frames_of(dispatcher) is None, "another ordering is in force"
        return
    assert (frames_of(dispatcher).cutoff, frames_of(dispatcher).frame) == (before.cutoff, before.frame)
    assert dispatcher.frames_state(1.0)["m"]["cutoff"] == state["cutoff"]


def test_a_state_that_no_frames_go_on_from_is_refused():
    state, _ = learned_frames()
    check_frames("calm", state)
    for name, wrong in (("calm", {}), ("calm", {**state, "frame": "1"}), ("unheard of", state)):
        with pytest.raises((KeyError, TypeError, ValueError)):
            check_frames(name, wrong)
