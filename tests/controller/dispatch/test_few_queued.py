"""Pacing while hardly anything waits: running answers are kept by their own slack, not by amortising each prefill."""

import pytest

from controller.core import events as ev
from controller.core.errors import ConfigError
from controller.dispatch import build_dispatcher
from controller.dispatch.pacing import Backlog
from tests.controller.dispatch.fleet import SPEED, request, sends, up

FAR = 10.0  # steps here are near their TPOT, which would say more than how much waits (test_near_steps.py)
FIRST_S = SPEED.prefill_a + SPEED.prefill_b * 1000


def after_first_tokens(*outputs, share=1.0, **pacing):
    """A dispatcher whose only instance decodes answers of these lengths at 0.021 s a step or so, with a TPOT of 0.03 s.
    The last prefill of 0.11 s has just ended."""
    dispatcher = build_dispatcher("slackline", {"pacing": {"patience": 1.0, "near": FAR, **pacing}})
    dispatcher.handle([up()], 0.0)
    dispatcher.handle([ev.SharesChanged("w", share)], 0.0)
    for index, output in enumerate(outputs):
        running = request(f"running{index}", ttft=5.0, tpot=0.03, prompt=1000, output=output)
        assert sends(dispatcher.handle([ev.Arrived(running)], 0.0)) == [(running.id, "w")]
        dispatcher.handle([ev.FirstToken(running.id)], FIRST_S)
    return dispatcher


def arrive(dispatcher, *names, ttft=0.5):
    now = FIRST_S + 0.01
    found = [request(name, arrival=now, ttft=ttft, tpot=0.03, prompt=300) for name in names]
    return sends(dispatcher.handle([ev.Arrived(each) for each in found], now))


def test_a_request_that_waits_alone_is_not_held_until_the_last_prefill_is_amortised():
    assert arrive(after_first_tokens(100), "next") == [("next", "w")]
    assert arrive(after_first_tokens(100, few_queued=0.0), "next") == [], (
        "eq. 5 holds it, for a stream that does not come"
    )


def test_the_check_with_the_whole_eq_1_does_not_hold_it_either():
    """By eq. 7, with a TPOT of 0.023 s and steps of 0.022 s, 0.015 s of prefill would take more than the TTFT."""
    answers = after_first_tokens(100, 100)
    now = FIRST_S + 0.01
    arrived = ev.Arrived(request("next", arrival=now, ttft=0.2, tpot=0.023, prompt=50))
    assert sends(answers.handle([arrived], now)) == [("next", "w")]


def test_one_answer_without_slack_of_its_own_does_not_hold_what_would_be_late():
    assert arrive(after_first_tokens(4), "next") == [("next", "w")]


def test_two_answers_without_slack_hold_it():
    assert arrive(after_first_tokens(4, 4), "next") == []


def test_what_can_wait_is_held_for_one_answer():
    assert arrive(after_first_tokens(4), "next", ttft=5.0) == []


def test_a_queue_is_paced_as_before():
    assert arrive(after_first_tokens(100), "one", "two") == []


def test_one_of_several_gateways_does_not_know_how_much_waits():
    assert arrive(after_first_tokens(100, share=0.5), "next") == []


def test_the_setting_has_bounds():
    with pytest.raises(ConfigError, match="few_queued"):
        Backlog.Config(few_queued=-1.0)
