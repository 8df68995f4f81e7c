"""Instances of one model whose contexts differ: who asks for much goes where it fits, and is stuck nowhere."""

import pytest

from controller.core import events as ev
from controller.core.types import Load, Role
from controller.dispatch import POLICY_SETS, build_dispatcher
from tests.controller.dispatch import decoders
from tests.controller.dispatch.fleet import request, sends, up

SHORT, LONG = {"max_model_len": 1000}, {"max_model_len": 4000}


def fleet(policy="slackline", **overrides):
    dispatcher = build_dispatcher(policy, overrides)
    dispatcher.handle([up("a-short", **SHORT), up("b-long", **LONG)], 0.0)
    return dispatcher


def sent(dispatcher, name, now=0.0, **more):
    return dict(sends(dispatcher.handle([ev.Arrived(request(name, now, ttft=30.0, tpot=1.0, **more))], now)))


@pytest.mark.parametrize("policy", sorted(POLICY_SETS))
@pytest.mark.parametrize(
    ("prompt", "max_tokens", "where"),
    [
        (900, 101, {"b-long"}),
        (1000, None, {"b-long"}),
        (900, 100, {"a-short", "b-long"}),
        (999, None, {"a-short", "b-long"}),
        (3000, 9000, {"b-long"}),
        (5000, None, {"b-long"}),
    ],
)
def test_a_request_goes_where_its_context_is_long_enough_or_to_the_longest(policy, prompt, max_tokens, where):
    """Seven, so that whoever takes turns or looks for the least to do would use both."""
    dispatcher, seen = fleet(policy), set()
    for i in range(7):
        for name, instance in sent(dispatcher, f"r{i}", i, prompt=prompt, max_tokens=max_tokens).items():
            seen.add(instance)
            dispatcher.handle([ev.FirstToken(name)], i + 0.6)
    assert seen
    assert seen <= where


def test_it_waits_for_the_longer_one_and_holds_up_nobody():
    dispatcher = fleet("fcfs_window", pacing={"window": 1})
    assert sent(dispatcher, "long-1", prompt=2000) == {"long-1": "b-long"}
    assert sent(dispatcher, "long-2", 0.1, prompt=2000) == {}
    assert sent(dispatcher, "brief", 0.2, prompt=200) == {"brief": "a-short"}
    reply = dispatcher.handle([ev.FirstToken("long-1"), ev.Finished("long-1", 10)], 1.0)
    assert sends(reply) == [("long-2", "b-long")]


def test_it_waits_for_a_longer_one_that_sleeps_but_for_none_that_drains():
    dispatcher = fleet()
    dispatcher.handle([ev.Telemetry("b-long", Load(0.0, awake=False))], 0.0)
    assert sent(dispatcher, "long", 0.1, prompt=2000) == {}
    reply = dispatcher.handle([ev.Telemetry("b-long", Load(1.0, awake=True))], 1.0)
    assert sends(reply) == [("long", "b-long")]

    dispatcher = fleet()
    dispatcher.handle([ev.InstanceDraining("b-long")], 0.0)
    assert sent(dispatcher, "long", 0.1, prompt=2000) == {"long": "a-short"}


def test_one_that_failed_goes_back_to_the_only_one_that_is_long_enough():
    dispatcher = fleet()
    assert sent(dispatcher, "long", prompt=2000) == {"long": "b-long"}
    dispatcher.handle([ev.Failed("long", before_first_token=True, error="cut off")], 1.0)
    reply = dispatcher.handle([ev.Woke()], 5.0)
    assert sends(reply) == [("long", "b-long")]


def test_a_prefill_engine_needs_no_room_for_the_answer():
    dispatcher = build_dispatcher("slackline")
    dispatcher.handle([up("p", role=Role.PREFILL, **SHORT), up("q", role=Role.PREFILL, **LONG)], 0.0)
    (worker,) = (each for each in dispatcher._fleet.workers.values() if each.id == "p")
    assert worker.holds(request("r", prompt=999, max_tokens=3000))
    assert not worker.holds(request("r", prompt=1000, max_tokens=1))


@pytest.mark.parametrize(
    ("prompt", "max_tokens", "target"),
    [(100, 901, "long"), (1000, None, "long"), (100, 900, "brief"), (5000, None, "long")],
)
def test_a_decode_stage_goes_where_its_context_is_long_enough(prompt, max_tokens, target):
    """`brief` is asked first where both will do: by name."""
    made = decoders.migrator(decoders=0)
    made.handle([decoders.up("brief", **SHORT), decoders.up("long", **LONG)], 0.0)
    reply = made.handle([decoders.done("r", prompt=prompt, max_tokens=max_tokens)], 0.0)
    assert decoders.places(reply) == [("r", target)]
