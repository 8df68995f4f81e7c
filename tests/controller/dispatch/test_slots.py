"""How many sequences an engine is given at once: the smaller of what is configured and what it says of itself."""

import inspect

import pytest

from controller.core import events as ev
from controller.core.types import InstanceSpec, Load
from controller.dispatch import build_dispatcher
from controller.dispatch.shadow import UNSAID_SEQS
from controller.models import Instance
from controller.services.instances import instance_register
from tests.controller.dispatch.fleet import request, sends, up

OURS = {"provisioner": "process"}


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
    dispatcher.handle([up(slots=6, labels=OURS)], 0.0)
    told(dispatcher, 6)
    fewer = up(slots=4, labels=OURS)
    dispatcher.handle([fewer], 2.0)
    told(dispatcher, 6, since=3.0)
    assert fewer.spec.max_num_seqs == 4, "what is configured is the gateway's, and stays"
    assert sent(dispatcher) == 4


@pytest.mark.parametrize(
    ("configured", "labels", "says", "given"),
    [
        (64, OURS, 6, 6),
        (64, {}, 6, 6),
        (16, {"provisioner": "static"}, 64, 16),
        (UNSAID_SEQS, OURS, 64, UNSAID_SEQS),  # it was started with what is configured: somebody has changed that since
        (UNSAID_SEQS, {"provisioner": "static"}, 64, 64),  # registered without a word about it
        (UNSAID_SEQS, {"provisioner": "static"}, 6, 6),
        (16, OURS, None, 16),
    ],
)
def test_the_smaller_one_holds_where_both_are_somebodys_word(configured, labels, says, given):
    dispatcher = build_dispatcher("slackline")
    dispatcher.handle([up(slots=configured, labels=labels)], 0.0)
    assert slots(dispatcher) == configured, "nothing was heard of it yet"
    told(dispatcher, says)
    assert slots(dispatcher) == given


def test_what_an_engine_once_said_of_itself_holds_until_it_says_otherwise():
    dispatcher = build_dispatcher("slackline")
    dispatcher.handle([up(slots=64)], 0.0)
    told(dispatcher, 6)
    told(dispatcher, None, since=3.0)
    assert slots(dispatcher) == 6


def test_the_number_that_stands_for_none_is_the_one_everybody_leaves():
    assert InstanceSpec("w", "m").max_num_seqs == UNSAID_SEQS
    assert Instance._meta.get_field("max_num_seqs").default == UNSAID_SEQS
    assert inspect.signature(instance_register).parameters["max_num_seqs"].default == UNSAID_SEQS
