"""Which instances alone can keep recent targets, in numbers (SPEED: 10 ms + 0.1 ms a prompt token, steps of 21 ms)."""

from dataclasses import replace

import pytest

from controller.core import events as ev
from controller.core.types import InstanceSpec, Role
from controller.dispatch import build_dispatcher, build_scheduler
from controller.dispatch.shadow_state import ShadowInstance
from controller.dispatch.sole_keepers import CLEARLY, sole_keepers
from controller.predict.lengths import CachedShares
from tests.controller.dispatch.fleet import SPEED, request

SLOW = SPEED._replace(**{name: 3 * value for name, value in SPEED._asdict().items()})


def up(name, latency, **more):
    return ev.InstanceUp(InstanceSpec(name, "m", latency=latency, max_num_seqs=32, **more))


def needed(dispatcher, now=0.0):
    return {state.id for state in dispatcher.fleet(now) if state.needed}


def fleet(*ups):
    dispatcher = build_dispatcher("slackline")
    dispatcher.handle([up("slow", SLOW), up("fast", SPEED), *ups], 0.0)
    return dispatcher


@pytest.mark.parametrize(
    ("asked", "who"),
    [
        ({"ttft": 0.2, "prompt": 1000}, {"fast"}),  # 0.11 and 0.33 s
        ({"ttft": 0.27, "prompt": 1000}, set()),  # by less than the predictions may be wrong
        ({"ttft": 5.0, "tpot": 0.04}, {"fast"}),  # 21 and 63 ms
        ({"ttft": 5.0, "tpot": 0.04, "output": 1}, set()),  # one token has no pace
        ({"ttft": 5.0, "deadline": 0.3}, {"fast"}),  # 0.02 + 9 steps: 0.21 and 0.63 s
        ({"ttft": 5.0}, set()),
        ({"ttft": 0.05, "prompt": 1000}, set()),  # nobody can
    ],
)
def test_who_is_needed(asked, who):
    dispatcher = fleet()
    dispatcher.handle([ev.Arrived(request("r", **asked))], 0.0)
    assert needed(dispatcher) == who


def test_two_that_can_are_not_needed_and_one_that_drains_takes_no_ones_place():
    dispatcher = fleet(up("other", SPEED))
    dispatcher.handle([ev.Arrived(request("r", ttft=0.2, prompt=1000))], 0.0)
    assert needed(dispatcher) == set()
    dispatcher.handle([ev.InstanceDraining("other")], 0.0)
    assert needed(dispatcher) == {"fast"}


def test_the_last_one_is_not_needed():
    dispatcher = build_dispatcher("slackline")
    dispatcher.handle([up("fast", SPEED), ev.Arrived(request("r", ttft=0.2, prompt=1000))], 0.0)
    assert needed(dispatcher) == set()


def test_the_only_one_with_the_context_is_needed():
    dispatcher = build_dispatcher("slackline")
    dispatcher.handle([up("short", SPEED, max_model_len=500), up("long", SPEED, max_model_len=5000)], 0.0)
    dispatcher.handle([ev.Arrived(request("r", ttft=5.0, prompt=1000))], 0.0)
    assert needed(dispatcher) == {"long"}


def test_an_easier_request_does_not_hide_a_harder_one_and_both_are_forgotten():
    dispatcher = fleet()
    hard, easy = request("hard", ttft=0.2, prompt=1000), request("easy", ttft=5.0, prompt=1000)
    dispatcher.handle([ev.Arrived(hard), ev.Arrived(easy)], 0.0)
    dispatcher.handle([ev.Arrived(request("later", arrival=40.0, ttft=5.0))], 40.0)
    assert needed(dispatcher, 40.0) == {"fast"}
    dispatcher.handle([ev.Arrived(request("last", arrival=75.0, ttft=5.0))], 75.0)
    assert needed(dispatcher, 75.0) == set()
    assert needed(fleet(), 75.0) == set()


def test_instances_of_other_models_are_apart():
    dispatcher = fleet()
    dispatcher.handle([ev.InstanceUp(InstanceSpec("o", "other", latency=SPEED, max_num_seqs=32))], 0.0)
    dispatcher.handle([ev.Arrived(request("r", ttft=0.2, prompt=1000))], 0.0)
    assert needed(dispatcher) == {"fast"}


def test_one_that_is_quick_to_the_first_token_is_needed_though_another_ends_first():
    """Which one a request is judged by is not which one ends it first: 0.11 s and steps of 42 ms, 0.33 and 10.5."""
    early = SPEED._replace(**{name: 2 * value for name, value in SPEED._asdict().items() if name.startswith("decode")})
    soon = SLOW._replace(**{name: value / 2 for name, value in SPEED._asdict().items() if name.startswith("decode")})
    dispatcher = build_dispatcher("slackline")
    dispatcher.handle([up("soon", soon), up("early", early)], 0.0)
    dispatcher.handle([ev.Arrived(request("r", ttft=0.2, tpot=1.0, prompt=1000, output=400))], 0.0)
    assert needed(dispatcher) == {"early"}


def test_a_request_that_no_one_holds_hides_no_other():
    dispatcher = build_dispatcher("slackline")
    dispatcher.handle([up("short", SPEED, max_model_len=500), up("long", SPEED, max_model_len=5000)], 0.0)
    fits, huge = request("fits", ttft=5.0, tpot=1.0, prompt=1000), request("huge", ttft=5.0, prompt=9000)
    dispatcher.handle([ev.Arrived(fits), ev.Arrived(huge)], 0.0)
    assert needed(dispatcher) == {"long"}


def test_what_is_cached_makes_none_of_two_alike_the_only_one():
    """0.11 s with an empty cache, 0.03 with 0.8 of the prompt cached; 0.08 s are allowed."""
    warm, cold = (ShadowInstance(InstanceSpec(name, "m", latency=SPEED, max_num_seqs=32)) for name in ("warm", "cold"))
    asked = request("r", ttft=0.08, prompt=1000)
    warm.cached = CachedShares.of([[asked.tenant, asked.slo_class, 0.8]])
    assert warm.prefill_s(asked) < 0.08 < cold.prefill_s(asked) / CLEARLY
    assert sole_keepers([asked], [warm, cold]) == set()


def test_while_one_is_guessed_nobody_is_the_only_one():
    dispatcher = fleet(up("new", None))
    dispatcher.handle([ev.Arrived(request("r", ttft=0.15, prompt=1000))], 0.0)
    assert needed(dispatcher) == set()


def test_the_thinking_deadline_counts_in_place_of_the_guess_of_a_first_token():
    dispatcher = fleet()
    asked = request("r", ttft=0.05, prompt=1000)
    dispatcher.handle([ev.Arrived(replace(asked, targets=asked.targets._replace(thinking_s=0.2)))], 0.0)
    assert needed(dispatcher) == {"fast"}


@pytest.mark.parametrize(("ttft", "who"), [(5.0, set()), (0.2, {"fast"})])
def test_an_instance_that_only_prefills_makes_no_pace(ttft, who):
    """Steps of 63 ms would be too slow at the slow one, if it had any."""
    dispatcher = build_dispatcher("slackline")
    roles = [up(name, latency, role=Role.PREFILL) for name, latency in (("slow", SLOW), ("fast", SPEED))]
    dispatcher.handle([*roles, up("decodes", SPEED, role=Role.DECODE)], 0.0)
    dispatcher.handle([ev.Arrived(request("r", ttft=ttft, tpot=0.04, prompt=1000))], 0.0)
    assert needed(dispatcher) == who


def disaggregated(*prefills, decoders):
    """A scheduler with instances of these latencies."""
    scheduler = build_scheduler("slackline")
    for role, latencies in ((Role.PREFILL, prefills), (Role.DECODE, decoders)):
        scheduler.handle([up(f"{role}{i}", each, role=role) for i, each in enumerate(latencies)], 0.0)
    return scheduler


@pytest.mark.parametrize(
    ("asked", "who"),
    [
        ({"tpot": 0.04}, {"decode0"}),  # steps of 21 and 63 ms
        ({"tpot": 0.04, "output": 1}, set()),
        ({"tpot": 0.06}, set()),
        ({"deadline": 0.3}, {"decode0"}),  # 9 steps: 0.19 and 0.57 s
        ({"ttft": 0.15, "prompt": 1000}, {"prefill0"}),  # 0.11 and 0.33 s
        ({"ttft": 0.15, "prompt": 1000, "tpot": 0.04}, {"prefill0", "decode0"}),
    ],
)
def test_each_stage_has_keepers_of_its_own(asked, who):
    scheduler = disaggregated(SPEED, SLOW, decoders=(SPEED, SLOW))
    scheduler.handle([ev.Arrived(request("r", **({"ttft": 5.0, "tpot": 1.0} | asked)))], 0.0)
    assert {state.id for state in scheduler.fleet(0.0) if state.needed} == who
    assert not {state.id for state in scheduler.fleet(70.0) if state.needed}, "it was the only such request"


def test_a_decoder_whose_steps_were_measured_is_not_guessed_for_the_prefills_it_never_computes():
    slow, fast = (ShadowInstance(InstanceSpec(name, "m", max_num_seqs=32, role=Role.DECODE)) for name in ("a", "b"))
    asked = request("r", tpot=0.04)
    assert sole_keepers([asked], [slow, fast]) == set(), "nothing is known of them"
    for instance, step_s in ((slow, 0.063), (fast, 0.021)):
        instance.send(asked, 0.0, 0, 1)
        instance.first_token("r", 0.0, elsewhere=True)
        for at in range(1, 40):
            instance.progress("r", 1 + 10 * at, at * 10 * step_s)
    assert sole_keepers([asked], [slow, fast]) == {"b"}


def test_one_that_left_is_wanted_while_requests_are_refused_for_the_want_of_it():
    dispatcher = fleet()
    dispatcher.handle([ev.InstanceDown("fast")], 0.0)
    dispatcher.handle([ev.Arrived(request("easy", ttft=5.0, tpot=1.0))], 1.0)
    assert dispatcher.wanted(1.0) == set()
    hard = request("hard", arrival=2.0, ttft=0.2, prompt=1000)
    dispatcher.handle([ev.Arrived(hard)], 2.0)
    assert dispatcher.wanted(2.0) == dispatcher.wanted(60.0) == {"fast"}
    dispatcher.handle([up("fast", SPEED)], 61.0)
    assert (dispatcher.wanted(61.0), needed(dispatcher, 61.0)) == (set(), {"fast"}), "its client may come back"
    dispatcher.handle([ev.InstanceDown("fast")], 200.0)
    assert dispatcher.wanted(200.0) == set()


def test_a_decoder_that_left_is_wanted_for_its_pace():
    scheduler = disaggregated(SPEED, decoders=(SPEED, SLOW))
    scheduler.handle([ev.InstanceDown("decode0")], 0.0)
    scheduler.handle([ev.Arrived(request("r", ttft=5.0, tpot=0.04))], 0.0)
    assert scheduler.wanted(0.0) == {"decode0"}


def test_one_whose_speed_was_only_guessed_is_not_wanted():
    dispatcher = build_dispatcher("slackline")
    dispatcher.handle([up("slow", SLOW), up("gone", None), ev.InstanceDown("gone")], 0.0)
    dispatcher.handle([ev.Arrived(request("hard", ttft=0.2, prompt=1000))], 0.0)
    assert dispatcher.wanted(0.0) == set()
