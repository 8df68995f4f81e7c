"""Who decodes beside whom: a request that can wait does not cost an answer its TPOT."""

import math

import pytest

from controller.core import events as ev
from controller.core.errors import ConfigError
from controller.core.types import InstanceSpec, Load
from controller.dispatch import build_dispatcher
from controller.dispatch.pacing import Backlog
from tests.controller.dispatch.fleet import SPEED, kinds, request, sends, up

STEP = SPEED.decode_a + SPEED.decode_c  # of one sequence
FIRST_S = SPEED.prefill_a + SPEED.prefill_b * 100


def fleet(*names, **pacing):
    dispatcher = build_dispatcher("slackline", {"pacing": pacing})
    dispatcher.handle([up(name) for name in names], 0.0)
    return dispatcher


def begin(dispatcher, name, on, at=0.0, **targets):
    """An answer that has its first token on this instance. Returns when."""
    arrived = request(name, arrival=at, **targets)
    assert sends(dispatcher.handle([ev.Arrived(arrived)], at)) == [(name, on)]
    dispatcher.handle([ev.FirstToken(name)], at + FIRST_S)
    return at + FIRST_S


def arrive(dispatcher, name, now, **targets):
    return sends(dispatcher.handle([ev.Arrived(request(name, arrival=now, **targets))], now))


def test_a_request_that_can_wait_goes_where_no_answer_misses_its_tpot_for_it():
    dispatcher = fleet("a", "b")
    now = begin(dispatcher, "tight", "a", tpot=STEP + 0.0005, output=4)
    now = begin(dispatcher, "loose", "b", at=now, ttft=5.0, tpot=10.0, output=400)
    assert arrive(dispatcher, "next", now, ttft=5.0, tpot=10.0) == [("next", "b")]


def test_it_waits_where_there_is_no_such_instance_until_the_answer_has_ended():
    dispatcher = fleet("a")
    now = begin(dispatcher, "tight", "a", tpot=STEP + 0.0005, output=4)
    assert arrive(dispatcher, "next", now, ttft=5.0, tpot=10.0) == []
    assert sends(dispatcher.handle([ev.Finished("tight", 4)], now + 0.1)) == [("next", "a")]


@pytest.mark.parametrize("patience", [0.3, 0.6])
def test_it_waits_no_longer_than_its_patience_and_is_looked_at_then(patience):
    dispatcher = fleet("a", patience=patience)
    now = begin(dispatcher, "tight", "a", tpot=STEP + 0.0005, output=400)
    late = request("next", arrival=now, ttft=1.0, tpot=10.0)
    reply = dispatcher.handle([ev.Arrived(late)], now)
    assert sends(reply) == []
    must_go_s = 1.0 - FIRST_S
    assert reply.wake_at == pytest.approx(now + (1 - patience) * must_go_s)
    reply = dispatcher.handle([ev.Woke()], reply.wake_at)
    assert sends(reply) == [("next", "a")], "it may cost one answer its TPOT when it cannot wait longer (decision 266)"
    assert kinds(reply, ev.Send) == ["next"]


def test_a_tight_request_does_not_go_where_its_own_steps_would_be_too_long():
    dispatcher = fleet("a", "b", margin=1e9)
    now = 0.0
    for index in range(4):  # in turn, since no step is near a TPOT yet
        now = begin(dispatcher, f"loose{index}", "ab"[index % 2], at=now, ttft=5.0, tpot=10.0, output=400)
    dispatcher.handle([ev.Finished("loose0", 400)], now)
    tpot = SPEED.decode_a + 2.5 * SPEED.decode_c  # with one more, a step of `b` has three
    assert arrive(dispatcher, "tight", now, tpot=tpot) == [("tight", "a")]
    assert arrive(dispatcher, "another", now, tpot=tpot) == [], "both have two sequences now"


LOOSE = {"ttft": 5.0, "tpot": 10.0, "output": 50}


def crowded(**pacing):
    """Two loose answers at `a`, three at `b`; a step of three is near the TPOT of a request that has ended."""
    dispatcher = fleet("a", "b", **pacing)
    now = begin(dispatcher, "tight", "a", tpot=SPEED.decode_a + 6 * SPEED.decode_c, output=2)
    dispatcher.handle([ev.Finished("tight", 2)], now)
    for index, where in enumerate("babab"):
        now = begin(dispatcher, f"loose{index}", where, at=now, **LOOSE)
    return dispatcher, now


def test_loose_requests_go_together_where_steps_are_near_a_tpot_of_recent_traffic():
    assert arrive(*with_name(crowded(), "next"), **LOOSE) == [("next", "b")]
    assert arrive(*with_name(crowded(margin=1e9), "next"), **LOOSE) == [("next", "a")]


def test_one_that_is_due_soon_goes_where_steps_are_shorter():
    due = {**LOOSE, "deadline": FIRST_S + LOOSE["output"] * 3 * STEP}
    assert arrive(*with_name(crowded(margin=4.0), "due"), **due) == [("due", "a")], (
        "a step may not take four times that"
    )
    assert arrive(*with_name(crowded(margin=1.5), "due"), **due) == [("due", "b")]


def test_what_prompts_take_of_an_instances_time_makes_its_tokens_slower():
    """Decision 321: an answer among many gets a step only between two prompts."""
    due = {**LOOSE, "deadline": FIRST_S + LOOSE["output"] * 3 * STEP}
    dispatcher, now = crowded(margin=1.5)
    prompt_s = SPEED.prefill_a + SPEED.prefill_b * 2000
    for index in range(30):
        arrived = request(f"prompt{index}", arrival=now, prompt=2000, **{**LOOSE, "output": 1})
        assert sends(dispatcher.handle([ev.Arrived(arrived)], now)) == [(f"prompt{index}", "b")]
        now += prompt_s
        dispatcher.handle([ev.FirstToken(f"prompt{index}"), ev.Finished(f"prompt{index}", 1)], now)
    assert arrive(dispatcher, "due", now, **due) == [("due", "a")]
    assert arrive(dispatcher, "other", now + 20.0, **due) == [("other", "b")], "that was long ago"


@pytest.mark.parametrize(("tokens_s", "goes"), [(0, "b"), (6_000, "a")])
def test_prompts_of_others_make_an_instances_tokens_slower_too(tokens_s, goes):
    """Of another client of the engine, as its counters show: at 6,000 tokens/s they take 0.6 of its time."""
    due = {**LOOSE, "deadline": FIRST_S + LOOSE["output"] * 3 * STEP}
    dispatcher, now = crowded(margin=1.5)
    for second in range(4):
        seen = Load(now, running=4, prompt_tokens_total=1_000_000 + tokens_s * second)
        dispatcher.handle([ev.Telemetry("b", seen)], now)
        now += 1.0
    assert arrive(dispatcher, "due", now, **due) == [("due", goes)]


def test_a_step_has_the_time_that_later_ones_of_its_workflow_can_make_up_for():
    share_s = FIRST_S + LOOSE["output"] * 3 * STEP
    due = {**LOOSE, "deadline": share_s, "workflow": "w", "may_defer": True}
    far = share_s + 2 * LOOSE["output"] * 9 * STEP + 1.0  # of which it may use half
    assert arrive(*with_name(crowded(margin=4.0), "due"), **due, workflow_left_s=share_s) == [("due", "a")]
    assert arrive(*with_name(crowded(margin=4.0), "due"), **due, workflow_left_s=far) == [("due", "b")]


def test_so_it_waits_for_longer_too():
    dispatcher = fleet("a")
    now = begin(dispatcher, "tight", "a", tpot=STEP + 0.0005, output=6000)
    step = {"ttft": 1.0, "tpot": 10.0, "deadline": 1.0, "output": 1, "workflow": "w", "may_defer": True}
    arrived = request("next", arrival=now, workflow_left_s=5.0, **step)
    until = now + 0.7 * (1.0 - FIRST_S + 0.5 * 4.0)
    assert sends(dispatcher.handle([ev.Arrived(arrived)], now)) == []
    assert sends(dispatcher.handle([ev.Woke()], until - 0.01)) == []
    assert sends(dispatcher.handle([ev.Woke()], until)) == [("next", "a")]


def with_name(found, name):
    dispatcher, now = found
    return dispatcher, name, now


def test_what_an_operator_forces_goes_at_once():
    dispatcher = fleet("a")
    now = begin(dispatcher, "tight", "a", tpot=STEP + 0.0005, output=400)
    assert arrive(dispatcher, "next", now, ttft=5.0, tpot=10.0) == []
    forced = ev.Command("c", "operator", "reprioritise", ("next",), 0)
    assert sends(dispatcher.handle([forced], now)) == [("next", "a")]


def test_a_queue_is_paced_by_eq_5_alone():
    for few_queued, expected in ((0.0, [("next", "a")]), (1.5, [])):
        dispatcher = fleet("a", few_queued=few_queued, near=10.0)
        now = begin(dispatcher, "running", "a", ttft=5.0, output=400)
        assert arrive(dispatcher, "next", now, ttft=5.0, tpot=STEP + 0.0005) == expected


def test_settings_have_bounds():
    for name, value in (("patience", -0.1), ("patience", 1.1), ("margin", 0.5), ("margin", math.nan)):
        with pytest.raises(ConfigError, match=name):
            Backlog.Config(**{name: value})


def test_it_does_not_wait_for_an_instance_that_cannot_take_it():
    """Too short a context, no KV left, or one that failed it."""
    for short in ({"max_model_len": 120}, {"kv_capacity_tokens": 400}):
        dispatcher = build_dispatcher("slackline")
        dispatcher.handle([up("a"), up("b", **short)], 0.0)
        now = begin(dispatcher, "tight", "a", tpot=SPEED.decode_a + 6 * SPEED.decode_c, output=2)
        dispatcher.handle([ev.Finished("tight", 2)], now)
        for index, where in enumerate("babab"):
            now = begin(dispatcher, f"loose{index}", where, at=now, **{**LOOSE, "prompt": 50, "output": 20})
        assert arrive(dispatcher, "long", now, **{**LOOSE, "prompt": 300}) == [("long", "a")], short


def test_it_does_not_wait_for_steps_that_no_instance_has():
    dispatcher = fleet("a")
    now = begin(dispatcher, "running", "a", ttft=5.0, tpot=10.0, output=400)
    assert arrive(dispatcher, "next", now, ttft=5.0, tpot=0.95 * STEP) == [("next", "a")]


def test_nothing_waits_on_the_guess_of_an_instance_that_nobody_profiled():
    dispatcher = build_dispatcher("slackline")
    dispatcher.handle([ev.InstanceUp(InstanceSpec("a", "m", max_num_seqs=32))], 0.0)
    now = begin(dispatcher, "running", "a", ttft=5.0, tpot=10.0, output=400)
    assert arrive(dispatcher, "next", now, ttft=5.0, tpot=0.012) == [("next", "a")]


def test_nothing_waits_under_an_admission_that_knows_no_latest_time():
    dispatcher = build_dispatcher("slackline", {"admission": {"name": "admit_all"}})
    dispatcher.handle([up("a")], 0.0)
    now = begin(dispatcher, "running", "a", ttft=5.0, tpot=10.0, output=400)
    assert arrive(dispatcher, "next", now, ttft=5.0, tpot=STEP + 0.0005) == [("next", "a")]


def test_the_record_says_that_it_waited():
    dispatcher = fleet("a")
    now = begin(dispatcher, "tight", "a", tpot=STEP + 0.0005, output=4)
    assert arrive(dispatcher, "next", now, ttft=5.0, tpot=10.0) == []
    (sent,) = dispatcher.handle([ev.Finished("tight", 4)], now + 0.1).actions
    assert (sent.decision.reason, sent.decision.figures["waited_s"]) == ("waited_for_tpot", pytest.approx(0.1))
