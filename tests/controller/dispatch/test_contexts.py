"""Instances of one model whose contexts differ: who asks for much goes where it fits, and is stuck nowhere."""

import pytest

from controller.core import events as ev
from controller.core.types import Load, Role
from controller.dispatch import POLICY_SETS, build_dispatcher, lane
from tests.controller.dispatch.disaggregation import decoders
from tests.controller.dispatch.disaggregation.decoders import of
from tests.controller.dispatch.disaggregation.test_links import seen
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


def test_it_waits_for_the_longer_one_and_holds_up_no_other():
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
    (instance,) = (each for each in dispatcher._fleet.instances.values() if each.id == "p")
    assert instance.holds(request("r", prompt=999, max_tokens=3000))
    assert not instance.holds(request("r", prompt=1000, max_tokens=1))


def test_the_longest_context_is_looked_for_once_however_many_wait_that_are_too_long(monkeypatch):
    """Engines that take all they are sent: each of them is asked of each request. The next time it is looked for
    again, as instances come and go."""
    walks = []
    longest = lane.longest_context
    monkeypatch.setattr(lane, "longest_context", lambda of: walks.append(1) or longest(of))
    dispatcher = fleet("round_robin")
    arrivals = [ev.Arrived(request(f"r{i}", prompt=5000)) for i in range(8)]
    assert {where for _, where in sends(dispatcher.handle(arrivals, 0.0))} == {"b-long"}
    assert len(walks) == 1
    reply = dispatcher.handle([up("c-longer", max_model_len=4500), ev.Arrived(request("next", prompt=5000))], 0.1)
    assert (sends(reply), len(walks)) == ([("next", "c-longer")], 2)


def test_of_what_finds_no_room_no_one_asks_whether_its_context_would_do(monkeypatch):
    """Its KV would not fit beside that of the first."""
    dispatcher = build_dispatcher("slackline")
    dispatcher.handle([up("w", kv_capacity_tokens=4000), ev.Arrived(request("first", ttft=30.0, prompt=3000))], 0.0)
    asked = []
    may_go = lane.Lane.may_go
    monkeypatch.setattr(lane.Lane, "may_go", lambda self, *args: asked.append(args[0]) or may_go(self, *args))
    reply = dispatcher.handle([ev.Arrived(request(f"r{i}", ttft=30.0, prompt=1500)) for i in range(8)], 0.0)
    assert (sends(reply), asked) == ([], [])


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


# ---- where else a prefilled request could start over -----------------------------------------------------------------


def begins_new_run(*others, links, prompt=2000):
    """Prefilled at `p`, which is long; `links` are down. Where it may not go then, None: it does not start over."""
    made = decoders.migrator(decoders=0)
    made.handle([decoders.up("p", Role.PREFILL, **LONG), *others], 0.0)
    reply = made.handle([*(seen(*pair) for pair in links), decoders.done("r", prompt=prompt)], 0.0)
    again = of(reply, ev.PrefillAgain)
    return again[0].avoid if again else None


@pytest.mark.parametrize(("prompt", "starts_over"), [(900, True), (2000, False)])
def test_it_does_not_start_over_for_an_instance_whose_context_is_too_short(prompt, starts_over):
    """The dispatcher would send it back to where it was prefilled: nobody else is long enough."""
    others = [decoders.up("d", **LONG), decoders.up("c", Role.COLLOCATED, **SHORT)]
    avoid = begins_new_run(*others, links=[("p", "d")], prompt=prompt)
    assert avoid == ({"p"} if starts_over else None)


def test_what_is_too_long_for_all_starts_over_where_no_ones_context_is_longer():
    others = [decoders.up("d", **LONG), decoders.up("c", Role.COLLOCATED, **LONG)]
    assert begins_new_run(*others, links=[("p", "d")], prompt=5000) == {"p"}


@pytest.mark.parametrize(("prompt", "starts_over"), [(900, True), (2000, False)])
def test_it_does_not_start_over_where_only_decoders_that_are_too_short_are_reached(prompt, starts_over):
    others = [decoders.up("q", Role.PREFILL, **LONG), decoders.up("long", **LONG), decoders.up("brief", **SHORT)]
    links = [("p", "long"), ("q", "long"), ("p", "brief")]
    assert begins_new_run(*others, links=links, prompt=prompt) == ({"p"} if starts_over else None)


def test_a_longer_one_that_sleeps_counts_among_the_lengths_as_it_does_for_the_dispatcher():
    others = [decoders.up("d", **LONG), decoders.up("c", Role.COLLOCATED, **SHORT)]
    made = decoders.migrator(decoders=0)
    made.handle([decoders.up("p", Role.PREFILL, **SHORT), decoders.up("q", Role.PREFILL, **LONG), *others], 0.0)
    made.handle([ev.Telemetry("q", Load(0.0, awake=False)), seen("p", "d")], 0.0)
    assert of(made.handle([decoders.done("r", prompt=2000)], 0.0), ev.PrefillAgain) == []
    (again,) = of(made.handle([ev.InstanceDraining("q")], 0.1), ev.PrefillAgain)
    assert again.avoid == {"p"}
