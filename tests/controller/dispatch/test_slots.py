"""How many sequences an engine is given at once: the smaller of what is configured and what it says of itself."""

import pytest

from controller.core import events as ev
from controller.core.types import DEFAULT_MAX_NUM_SEQS, Load
from controller.dispatch import build_dispatcher
from tests.controller.dispatch.fleet import request, sends, up


def told(dispatcher, slots, *, since=0.0):
    """Two reports of an engine that says how many sequences it runs."""
    dispatcher.handle([ev.Telemetry("w", Load(since, max_num_seqs=slots))], since)
    dispatcher.handle([ev.Telemetry("w", Load(since + 1.0, max_num_seqs=slots))], since + 1.0)


def sent(dispatcher, now=9.0):
    """To an idle fleet, of more small requests of no hurry than it could take."""
    rush = [ev.Arrived(request(f"r{i}", arrival=now, ttft=900.0, tpot=9.0, prompt=1)) for i in range(100)]
    return len(sends(dispatcher.handle(rush, now)))


def slots(dispatcher):
    (state,) = dispatcher.fleet(9.0)
    return state.slots


def test_an_engine_is_given_no_more_than_is_configured():
    dispatcher = build_dispatcher("slackline")
    dispatcher.handle([up(slots=6)], 0.0)
    told(dispatcher, 6)
    fewer = up(slots=4)
    dispatcher.handle([fewer], 2.0)
    told(dispatcher, 6, since=3.0)
    assert fewer.spec.max_num_seqs == 4, "what is configured is the gateway's, and stays"
    assert sent(dispatcher) == 4


@pytest.mark.parametrize(
    ("configured", "says", "given"),
    [
        (64, 6, 6),
        (16, 64, 16),
        (DEFAULT_MAX_NUM_SEQS, 64, DEFAULT_MAX_NUM_SEQS),  # somebody means just that
        (DEFAULT_MAX_NUM_SEQS, 6, 6),
        (16, None, 16),
        (None, 64, 64),  # registered without a word about it
        (None, 6, 6),
        (None, None, DEFAULT_MAX_NUM_SEQS),
    ],
)
def test_the_smaller_one_holds_where_both_are_somebodys_word(configured, says, given):
    dispatcher = build_dispatcher("slackline")
    dispatcher.handle([up(slots=configured)], 0.0)
    assert slots(dispatcher) == (configured or DEFAULT_MAX_NUM_SEQS), "nothing was heard of it yet"
    told(dispatcher, says)
    assert slots(dispatcher) == given


def test_what_an_engine_once_said_of_itself_holds_until_it_says_otherwise():
    dispatcher = build_dispatcher("slackline")
    dispatcher.handle([up(slots=64)], 0.0)
    told(dispatcher, 6)
    told(dispatcher, None, since=3.0)
    assert slots(dispatcher) == 6
