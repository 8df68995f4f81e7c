"""The dispatcher with an ordering that ranks by instance: unlike replicas, operators, instances that come and go."""

import json

import pytest

from controller.core import events as ev
from controller.core.types import InstanceSpec, LatencyCoefficients, Role
from controller.dispatch import build_dispatcher
from controller.dispatch.lane import GUESS
from controller.dispatch.queue import Entry, RequestQueue
from controller.dispatch.shadow_state import ShadowInstance
from controller.policies.ordering.calm import FEW
from tests.controller.dispatch.fleet import SPEED, kinds, request, sends, up

CALM = {
    "ordering": {"name": "calm"},
    "pacing": {"name": "fixed_window", "window": 1},
    "admission": {"name": "admit_all"},
    "routing": {"name": "least_outstanding"},
    "dispatch": {"refuse_infeasible": False},
}
SLOWER = LatencyCoefficients(*(4 * each for each in SPEED))


def unlike(overrides=None):
    """A quick instance of some 0.02 s a token, and one that takes four times as long; each is full."""
    dispatcher = build_dispatcher("slackline", {**CALM, **(overrides or {})})
    slow = ev.InstanceUp(InstanceSpec("slow", "m", latency=SLOWER, max_num_seqs=32))
    dispatcher.handle([up("quick"), slow, *(ev.Arrived(request(f"x{i}", output=5)) for i in (1, 2))], 0.0)
    return dispatcher


def ended(dispatcher, instance_id, now):
    """What runs there ends, so that there is room for one."""
    (held,) = dispatcher._fleet.instances[instance_id].waiting
    return dispatcher.handle([ev.FirstToken(held), ev.Finished(held, 5)], now)


def test_a_request_waits_for_the_instance_that_can_still_be_in_time():
    """100 tokens take 2 s on the quick instance and 8 s on the slow one."""
    dispatcher = unlike()
    tight, loose = request("tight", 0.1, 60.0, output=100, deadline=4.0), request("loose", 0.1, 60.0, output=200)
    assert sends(dispatcher.handle([ev.Arrived(tight), ev.Arrived(loose)], 0.1)) == []
    assert sends(ended(dispatcher, "slow", 0.2)) == [("loose", "slow")]
    assert sends(ended(dispatcher, "quick", 0.3)) == [("tight", "quick")]


def test_a_request_that_failed_on_the_only_instance_where_it_can_be_in_time_is_late():
    dispatcher = unlike()
    tight = request("tight", 0.1, 60.0, output=100, deadline=4.0)
    dispatcher.handle([ev.Arrived(tight)], 0.1)
    assert sends(ended(dispatcher, "quick", 0.2)) == [("tight", "quick")]
    assert sends(dispatcher.handle([ev.Failed("tight", True, "died")], 0.3)) == []
    assert sends(ended(dispatcher, "slow", 0.4)) == [("tight", "slow")]


@pytest.mark.parametrize("waiting", [0, 2 * FEW])
def test_a_request_waits_for_no_instance_whose_context_is_too_short(waiting):
    """With many others it is placed among them within their frame."""
    dispatcher = build_dispatcher("slackline", CALM)
    short = InstanceSpec("short", "m", latency=SPEED, max_num_seqs=32, max_model_len=1000)
    slow = InstanceSpec("slow", "m", latency=SLOWER, max_num_seqs=32)
    dispatcher.handle([ev.InstanceUp(short), ev.InstanceUp(slow)], 0.0)
    dispatcher.handle([ev.Arrived(request(f"x{i}", output=5)) for i in range(2)], 0.0)
    dispatcher.handle([ev.Arrived(request(f"late{i}", 0.0, 60.0, 1.0, deadline=0.1)) for i in range(waiting)], 0.1)
    long = request("long", 0.2, 60.0, prompt=2000, output=100, deadline=4.0)
    dispatcher.handle([ev.Arrived(long), ev.Arrived(request("able", 0.2, 60.0, output=50, value=0.1))], 0.2)
    assert sends(ended(dispatcher, "slow", 0.3)) == [("able", "slow")]
    assert dispatcher._fleet.lane("m").queue.frames.sent("long", "short").tier == "late"
    if not waiting:
        assert sends(ended(dispatcher, "slow", 0.4)) == [("long", "slow")]


def crowded(waiting):
    """An idle instance of 1,000 tokens, and full ones of 4,000 and 8,000 for which all requests wait."""
    dispatcher = build_dispatcher("slackline", CALM)
    for name, length in (("short", 1000), ("middle", 4000), ("long", 8000)):
        spec = InstanceSpec(name, "m", latency=SPEED, max_num_seqs=32, max_model_len=length)
        dispatcher.handle([ev.InstanceUp(spec)], 0.0)
    held = (ev.Arrived(request(f"x{i}", 0.0, 300.0, prompt=2000, output=500)) for i in range(2))
    dispatcher.handle(list(held), 0.0)
    dispatcher.handle(
        [ev.Arrived(request(f"r{i}", 0.1, 300.0, prompt=2000 + i, wait=600.0)) for i in range(waiting)], 0.1
    )
    assert len(dispatcher.queue()) == waiting
    return dispatcher


def test_an_arrival_looks_at_no_others_for_where_they_may_go(monkeypatch):
    dispatcher = crowded(3 * FEW)
    monkeypatch.setattr(RequestQueue, "selective", lambda self, tokens: pytest.fail("it looks at all that wait"))
    assert sends(dispatcher.handle([ev.Arrived(request("new", 0.2, 300.0, prompt=2000))], 0.2)) == []
    assert dispatcher._fleet.lane("m").queue.frames._columns.alive.sum() == 3 * FEW + 1


def test_a_frame_looks_at_instances_once_for_all_requests_that_fit_into_the_same(monkeypatch):
    dispatcher = crowded(3 * FEW)
    looked = []
    long_enough = ShadowInstance.long_enough
    monkeypatch.setattr(ShadowInstance, "long_enough", lambda *args: looked.append(args) or long_enough(*args))
    frames = dispatcher._fleet.lane("m").queue.frames
    frame = frames.frame
    dispatcher.handle([], 0.1 + 50.0)
    assert frames.frame > frame
    assert len(looked) < FEW


def test_requests_may_not_go_where_they_failed_or_are_too_long():
    """Contexts at, below and beyond those of instances; one that only prefills needs room for the prompt alone."""
    dispatcher = build_dispatcher("slackline", CALM)
    for at, (length, role) in enumerate(
        [
            (1000, Role.COLLOCATED),
            (1000, Role.PREFILL),
            (2000, Role.COLLOCATED),
            (2000, Role.PREFILL),
            (3000, Role.COLLOCATED),
        ]
    ):
        spec = InstanceSpec(f"i{at}", "m", latency=SPEED, max_num_seqs=32, max_model_len=length, role=role)
        dispatcher.handle([ev.InstanceUp(spec)], 0.0)
    lane = dispatcher._fleet.lane("m")
    lane.advance(0.0)
    entries = [
        Entry(request(f"{prompt}-{most}-{failed}", prompt=prompt, max_tokens=most), GUESS.cost(request("r")), 0.0, gone)
        for prompt in (900, 999, 1000, 1950, 1999, 2000, 2999, 3500)
        for most in (1, 50, 100, 101)
        for failed, gone in (("", frozenset()), ("failed", frozenset({"i2", "i4"})))
    ]
    for entry in entries:
        lane.queue.add(entry, 0.0)
    taking = list(lane.instances.values())
    expected = {}
    for entry in entries:
        able = [each for each in taking if each.long_enough(entry.request, 3000)]
        able = [each for each in able if each.id not in entry.excluded] or able
        if where := frozenset(lane.instances) - {each.id for each in able}:
            expected[entry.request.id] = where
    assert len(set(expected.values())) > 5
    for names in (None, [entry.request.id for entry in entries], [*expected][:3]):
        found = {name: where for where, some in lane._barred(taking, names).items() for name in some}
        assert found == {name: where for name, where in expected.items() if names is None or name in names}


def test_what_is_late_everywhere_takes_what_no_other_needs():
    dispatcher = unlike()
    late, able = request("late", 0.1, 60.0, output=100, deadline=1.0), request("able", 0.2, 60.0, output=900)
    dispatcher.handle([ev.Arrived(late), ev.Arrived(able)], 0.2)
    assert sends(ended(dispatcher, "slow", 0.3)) == [("able", "slow")]
    reply = ended(dispatcher, "quick", 0.4)
    assert sends(reply) == [("late", "quick")]
    assert reply.actions[0].decision.reason in ("late_everywhere", "hopeless_spare_budget")


def test_the_decision_says_what_spoke_for_the_instance_and_what_for_others():
    dispatcher = unlike()
    dispatcher.handle([ev.Arrived(request("a", 0.1, 60.0, output=100))], 0.1)
    (send,) = ended(dispatcher, "slow", 0.2).actions
    assert send.decision.reason == "goodput_window"
    figures, other = send.decision.figures, send.decision.rejected["quick"]
    assert figures["goodput_rate"] < other["goodput_rate"] < 6 * figures["goodput_rate"]
    assert other["outstanding"] == 1
    assert figures["cutoff"] == 0.8
    assert figures["frame"] >= 1
    json.dumps(send.decision.figures)


def test_the_window_of_similar_prompts_goes_first():
    """With one slot free what is worth most for its time goes; with three, three of similar lengths of 10, 10 and 10,
    not the one of 11, beside which there is only one of 6."""
    worth = {"a": (2000, 13.0), "b": (100, 10.0), "c": (110, 10.0), "d": (120, 10.0), "e": (1000, 6.5)}
    for slots, first in ((1, "a"), (3, "b")):
        dispatcher = build_dispatcher(
            "slackline", {**CALM, "ordering": {"name": "calm", "adapt": False, "cutoff": 0.5}}
        )
        dispatcher.handle([up(slots=1 + slots), ev.Arrived(request("x", output=5))], 0.0)
        dispatcher._fleet.instances["w"].spec.max_num_seqs = slots
        arrivals = [
            ev.Arrived(request(name, 0.1, 600.0, prompt=n, output=100, value=v)) for name, (n, v) in worth.items()
        ]
        dispatcher.handle(arrivals, 0.1)
        assert sends(ended(dispatcher, "w", 0.2)) == [(first, "w")]


def test_an_operator_moves_requests_before_and_behind_all_others():
    dispatcher = unlike()
    arrivals = [
        ev.Arrived(request(name, 0.1, 60.0, output=length)) for name, length in (("a", 50), ("b", 99), ("c", 9))
    ]
    dispatcher.handle(arrivals, 0.1)
    dispatcher.handle(
        [ev.Command("1", "op", "reprioritise", ("b",), 0), ev.Command("2", "op", "reprioritise", ("c",), 9)], 0.1
    )
    dispatcher.handle([ev.Command("3", "op", "pause", ("a",), None)], 0.1)
    assert sends(ended(dispatcher, "quick", 0.2)) == [("b", "quick")]
    assert sends(ended(dispatcher, "quick", 0.3)) == [("c", "quick")]
    assert sends(dispatcher.handle([ev.Command("4", "op", "resume", ("a",), None)], 0.35)) == []
    assert sends(ended(dispatcher, "quick", 0.4)) == [("a", "quick")]


def test_the_queue_shows_the_order_of_the_frame():
    """They arrive in another order than that of their worth."""
    dispatcher = unlike({"pacing": {"name": "fixed_window", "window": 2}})
    worth = {"low": 1, "high": 9, "mean": 4, "least": 0.5, "top": 20}
    arrivals = [ev.Arrived(request(name, 0.1, 600.0, output=100, value=value)) for name, value in worth.items()]
    sent = {name for name, _ in sends(dispatcher.handle(arrivals, 0.1))}
    frames = dispatcher._fleet.lane("m").queue.frames
    shown = dispatcher.queue().ids()
    assert (
        shown
        == list(frames.order("quick"))
        == [name for name in sorted(worth, key=worth.get) if name not in sent][::-1]
    )


def many(count=100, slots=(2, 2), **calm):
    """`count` requests wait at two alike instances, which take one request at a time."""
    dispatcher = build_dispatcher("slackline", {**CALM, **calm})
    for name in ("v", "w"):
        dispatcher.handle([up(name, slots=1), ev.Arrived(request(f"{name}x", output=5))], 0.0)
    dispatcher.handle([ev.Arrived(request(f"r{i:03}", 0.1, 600.0, output=100, value=1 + i)) for i in range(count)], 0.1)
    return dispatcher


def test_a_request_that_joins_again_within_the_frame_stands_once_in_an_order():
    dispatcher = many()
    ended(dispatcher, "v", 0.15)
    for number, verb in enumerate(("pause", "resume")):
        dispatcher.handle([ev.Command(str(number), "op", verb, ("r090",), None)], 0.16)
    ended(dispatcher, "w", 0.17)
    names = list(dispatcher._fleet.lane("m").queue.frames.order("v"))
    assert names.count("r090") == 1
    assert len(names) == len(set(names))


def test_what_is_worth_less_than_those_that_are_ranked_waits_with_the_rest():
    dispatcher = many(1000)
    late = request("late", 0.15, 60.0, output=100, deadline=0.2)
    dispatcher.handle([ev.Arrived(request("small", 0.15, 600.0, output=100, value=0.001)), ev.Arrived(late)], 0.15)
    ended(dispatcher, "v", 0.16)
    names = list(dispatcher._fleet.lane("m").queue.frames.order("v"))
    assert len(names) > 50
    assert not {"small", "late"} & set(names)


def test_a_frame_has_a_length_where_other_instances_decode():
    dispatcher = build_dispatcher("slackline", CALM)
    prefill = InstanceSpec("p", "m", role=Role.PREFILL, latency=SLOWER, max_num_seqs=1)
    dispatcher.handle([ev.InstanceUp(prefill), *(ev.Arrived(request(f"r{i}", output=50)) for i in range(5))], 0.0)
    frames = dispatcher._fleet.lane("m").queue.frames
    for at in (0.1, 0.2, 0.9):
        dispatcher.handle([ev.Arrived(request(f"x{at}", at, output=50))], at)
    assert frames.frame == 1
    assert frames.ends == pytest.approx(1.0)


def test_decoding_elsewhere_counts_as_time():
    """Of two that are worth the same, 100 tokens take 1.5 s elsewhere at least: one of them can only be late."""
    dispatcher = build_dispatcher("slackline", CALM)
    prefill = InstanceSpec("p", "m", role=Role.PREFILL, latency=SPEED, max_num_seqs=1)
    pace = ev.DecodePace("p", 0.03, 0.015, 8.0)
    dispatcher.handle([ev.InstanceUp(prefill), pace, ev.Arrived(request("x", output=5))], 0.0)
    tight, loose = (
        request(name, 0.1, 60.0, output=100, deadline=due) for name, due in (("tight", 1.4), ("loose", 60.0))
    )
    assert sends(dispatcher.handle([ev.Arrived(tight), ev.Arrived(loose)], 0.1)) == []
    (held,) = dispatcher._fleet.instances["p"].waiting.values()
    ended_there = ev.PrefillDone(held.request, "p", 100)
    assert sends(dispatcher.handle([ended_there], 0.2)) == [("loose", "p")]
    frames = dispatcher._fleet.lane("m").queue.frames
    assert frames.sent("tight", "p").tier == "late"
    assert frames.ends == pytest.approx(50 * 0.03)


def test_a_guess_of_an_instance_makes_no_request_late():
    """Nobody profiled the other one: it may be four times as fast as is assumed."""
    dispatcher = build_dispatcher("slackline", CALM)
    guessed = ev.InstanceUp(InstanceSpec("guessed", "m", max_num_seqs=32))
    dispatcher.handle([up("quick"), ev.Arrived(request("x", output=5)), guessed], 0.0)
    step_s = dispatcher._fleet.instances["guessed"].latency.decode(1, 0)
    tight = request("tight", 0.1, 60.0, output=100, deadline=60 * step_s)
    assert sends(dispatcher.handle([ev.Arrived(tight)], 0.1)) == [("tight", "guessed")]


def test_what_becomes_late_is_sent_where_there_is_room_once_the_frame_is_over():
    dispatcher = unlike()
    ended(dispatcher, "slow", 0.05)
    tight = request("tight", 0.1, 600.0, output=100, deadline=4.0)
    reply = dispatcher.handle([ev.Arrived(tight)], 0.1)
    assert sends(reply) == []
    sent, now = [], 0.1
    while not sent and now < 20.0:
        now = reply.wake_at
        reply = dispatcher.handle([], now)
        sent = sends(reply)
    assert sent == [("tight", "slow")]
    assert now < 5.0


def test_costs_of_nothing_leave_no_more_groups_than_copies():
    free = LatencyCoefficients(SPEED[0], 0.0, 0.0, *SPEED[3:])
    dispatcher = build_dispatcher("slackline", {**CALM, "ordering": {"name": "calm", "copies": 1}})
    for name, speed in (("a", free), ("b", SLOWER)):
        dispatcher.handle(
            [ev.InstanceUp(InstanceSpec(name, "m", role=Role.PREFILL, latency=speed, max_num_seqs=1))], 0.0
        )
    dispatcher.handle([ev.Arrived(request(f"r{i}", output=50)) for i in range(5)], 0.1)
    assert len(dispatcher._fleet.lane("m").queue.frames._lines) == 1


@pytest.mark.parametrize(("lost", "other"), [("quick", "slow"), ("slow", "quick")])
def test_an_instance_that_is_lost_takes_nothing_with_it(lost, other):
    dispatcher = unlike()
    names = {f"r{i}" for i in range(4)}
    dispatcher.handle([ev.Arrived(request(name, 0.1, 60.0, output=50, deadline=50.0)) for name in names], 0.1)
    (held,) = dispatcher._fleet.instances[lost].waiting
    dispatcher.handle([ev.Failed(held, True, "died"), ev.InstanceDown(lost)], 0.2)
    sent = set()
    for i in range(5):
        sent |= {name for name, where in sends(ended(dispatcher, other, 0.3 + i)) if where == other}
    assert sent == {*names, held}
    assert len(dispatcher.queue()) == 0


def test_a_cancelled_request_leaves_the_frames():
    dispatcher = unlike()
    dispatcher.handle([ev.Arrived(request("a", 0.1, 60.0)), ev.Arrived(request("b", 0.1, 60.0))], 0.1)
    dispatcher.handle([ev.Cancelled("a")], 0.1)
    assert sends(ended(dispatcher, "slow", 0.2)) == [("b", "slow")]
    (lane,) = dispatcher.lanes.values()
    assert not lane.queue.frames.due({"quick", "slow"}, 99.0)


def test_an_instance_is_not_idle_while_hundreds_wait_and_more_arrive():
    """An answer ends and another request arrives at the same moment, each time."""
    dispatcher = build_dispatcher("slackline", CALM)
    arrivals = (ev.Arrived(request(f"r{i}", ttft=60.0, output=5)) for i in range(200))
    ((held, _),) = sends(dispatcher.handle([up(slots=1), *arrivals], 0.1))
    for at in range(150):
        now = 0.1 + 0.001 * (at + 1)
        arrived = ev.Arrived(request(f"n{at}", now, 60.0, output=5, value=0.01))
        sent = sends(dispatcher.handle([ev.FirstToken(held), ev.Finished(held, 5), arrived], now))
        assert len(sent) == 1, at
        held = sent[0][0]


def test_waiting_time_ends_in_the_queue_as_ever():
    dispatcher = unlike()
    reply = dispatcher.handle([ev.Arrived(request("a", 0.1, 60.0, wait=1.0))], 0.1)
    assert reply.wake_at == pytest.approx(1.1)
    assert kinds(dispatcher.handle([], 1.11), ev.Drop) == ["a"]


def test_orderings_that_rank_once_have_no_frames():
    for policy in ("slackline", "hyperflexis", "scorpio"):
        dispatcher = build_dispatcher(policy)
        dispatcher.handle([up("w")], 0.0)
        assert all(lane.queue.frames is None for lane in dispatcher.lanes.values())
