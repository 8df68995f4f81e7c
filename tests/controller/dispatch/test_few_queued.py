"""Pacing while hardly anything waits: running answers are kept by their own slack, not by amortising each prefill."""

import pytest

from controller.core import events as ev
from controller.core.errors import ConfigError
from controller.dispatch import build_dispatcher
from controller.dispatch.pacing import Backlog
from tests.controller.dispatch.fleet import SPEED, request, sends, up

FIRST_S = SPEED.prefill_a + SPEED.prefill_b * 1000


def after_a_first_token(output=100, share=1.0, **pacing):
    """A dispatcher whose only instance decodes an answer at 0.021 s a step, with a TPOT of 0.03 s."""
    dispatcher = build_dispatcher("slackline", {"pacing": pacing})
    dispatcher.handle([up()], 0.0)
    dispatcher.handle([ev.SharesChanged("w", share)], 0.0)
    running = request("running", ttft=0.5, tpot=0.03, prompt=1000, output=output)
    assert sends(dispatcher.handle([ev.Arrived(running)], 0.0)) == [("running", "w")]
    dispatcher.handle([ev.FirstToken("running")], FIRST_S)
    return dispatcher


def arrive(dispatcher, *names):
    now = FIRST_S + 0.01
    found = [request(name, arrival=now, ttft=0.5, tpot=0.03, prompt=300) for name in names]
    return sends(dispatcher.handle([ev.Arrived(each) for each in found], now))


def test_a_request_that_waits_alone_is_not_held_until_the_last_prefill_is_amortised():
    assert arrive(after_a_first_token(), "next") == [("next", "w")]
    assert arrive(after_a_first_token(few_queued=0.0), "next") == [], "eq. 5 holds it, for a stream that does not come"


def test_an_answer_without_slack_of_its_own_still_holds_it():
    assert arrive(after_a_first_token(output=4), "next") == []


def test_a_queue_is_paced_as_before():
    assert arrive(after_a_first_token(), "one", "two") == []


def test_one_of_several_gateways_does_not_know_how_much_waits():
    assert arrive(after_a_first_token(share=0.5), "next") == []


def test_the_setting_has_bounds():
    with pytest.raises(ConfigError, match="few_queued"):
        Backlog.Config(few_queued=-1.0)
