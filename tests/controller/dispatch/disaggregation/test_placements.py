"""Where the decode stage goes: under its TPOT, where there is room, by each placement's own rule."""

import pytest

from controller.core import events as ev
from controller.core.errors import ConfigError
from controller.core.types import InstanceSpec, LatencyCoefficients, Load, Role
from controller.dispatch import MIGRATIONS, build_migrator, build_scheduler
from controller.dispatch.disaggregation.placements import Prefilled
from tests.controller.dispatch.disaggregation.decoders import STEP, commit, done, migrator, of, places, up
from tests.controller.dispatch.fleet import request


def test_the_tightest_tpot_goes_first_and_only_while_the_step_stays_under_it():
    """A step of n takes 20 + n ms, a TPOT of 22.5 ms allows two. Of a(30), b(22.5), c(25), d(22.5) in order of arrival
    b and d go first; with either of the others a step would take 23 ms."""
    made = migrator()
    tpots = {"a": 0.030, "b": 0.0225, "c": 0.025, "d": 0.0225}
    reply = made.handle([done(name, tpot=tpot) for name, tpot in tpots.items()], 0.0)
    assert places(reply) == [("b", "d0"), ("d", "d0")]
    assert made.waiting() == 2


def test_who_waits_goes_when_a_tight_one_ends():
    made = migrator()
    made.handle([done("tight", tpot=0.0215)], 0.0)
    assert places(made.handle([done("loose", tpot=0.05, output=50)], 0.0)) == []
    commit(made, "tight", now=0.1)
    assert places(made.handle([ev.Finished("tight", 10)], 0.2)) == [("loose", "d0")]


def test_the_smallest_next_step_matures_first():
    made = migrator(decoders=2)
    assert places(made.handle([done("a"), done("b"), done("c")], 0.0)) == [("a", "d0"), ("b", "d1"), ("c", "d0")]


def test_waiting_costs_ttft_and_the_hopeless_go_only_where_they_harm_no_other():
    """A step takes 21 ms: after 90 ms the first byte cannot come within 0.1 s any more. Beside `tight` (21.5 ms) a
    second one harms; on an instance of its own it does not."""
    made = migrator()
    made.handle([done("tight", tpot=0.0215, output=100), done("late", ttft=0.1, tpot=0.03)], 0.0)
    commit(made, "tight")
    assert places(made.handle([ev.Woke()], 0.1)) == []
    (place,) = of(made.handle([up("d1")], 0.2), ev.Place)
    assert (place.target, place.decision.reason) == ("d1", "hopeless_harmless")
    assert place.decision.figures["slack_s"] == pytest.approx(0.1 - 0.2)


def test_one_in_time_is_not_hopeless_however_short_its_answer():
    made = migrator(slots=1)
    made.handle([done("first", tpot=0.05, output=100), done("next", ttft=0.33, tpot=0.06, output=5)], 0.0)
    commit(made, "first")
    (place,) = of(made.handle([ev.Finished("first", 100)], 0.3), ev.Place)
    assert place.decision.reason == "fits_tpot"
    assert place.decision.figures["slack_s"] == pytest.approx(0.03)


def test_a_hopeless_request_binds_none_after_it():
    """Its TPOT of 1 ms cannot be kept; were it to count, nothing could ever join it."""
    made = migrator()
    (place,) = of(made.handle([done("impossible", tpot=0.001)], 0.0), ev.Place)
    assert place.decision.reason == "hopeless_harmless"
    assert places(made.handle([done("next", tpot=0.03)], 0.0)) == [("next", "d0")]


def test_kv_room_counts_the_expected_answer_and_slots_bound():
    made = build_migrator("hyperflexis")
    made.handle([up("d0", kv_capacity_tokens=1000)], 0.0)
    assert places(made.handle([done("a", prompt=400, output=100)], 0.0)) == [("a", "d0")]
    assert places(made.handle([done("b", prompt=300, output=200)], 0.0)) == []  # 500 < 500 is false
    assert places(made.handle([done("c", prompt=300, output=199)], 0.0)) == [("c", "d0")]
    full = migrator(slots=1)
    assert places(full.handle([done("a"), done("b")], 0.0)) == [("a", "d0")]


def test_round_robin_takes_turns_and_least_outstanding_looks():
    made = migrator("round_robin", decoders=3)
    reply = made.handle([done(f"r{i}") for i in range(4)], 0.0)
    assert [target for _, target in places(reply)] == ["d0", "d1", "d2", "d0"]
    made = migrator("least_outstanding", decoders=2)
    made.handle([done("a"), done("b")], 0.0)
    made.handle([ev.Finished("b", 10)], 0.0)
    assert places(made.handle([done("c")], 0.0)) == [("c", "d1")]


def test_one_shot_chooses_when_the_prefill_is_sent_and_keeps_to_it():
    made = migrator("slackline", decoders=2, migration={"name": "one_shot"})
    made.handle([ev.PrefillSent(request("a"), "p"), ev.PrefillSent(request("b"), "p")], 0.0)
    assert places(made.handle([done("b", 1.0)], 1.0)) == [("b", "d1")]
    made.handle([ev.Finished("b", 10)], 1.5)
    assert places(made.handle([done("a", 2.0)], 2.0)) == [("a", "d0")]
    reply = made.handle([ev.TransferFailed("a", "d0", "no_room")], 2.1)
    assert places(reply) == []
    assert places(made.handle([ev.Woke()], reply.wake_at)) == [("a", "d0")]
    assert places(made.handle([ev.TransferFailed("a", "d0", "link_down")], 3.0)) == [("a", "d1")]


def test_prefill_and_collocated_instances_and_other_models_take_no_decode_stage():
    made = build_migrator("hyperflexis")
    other = ev.InstanceUp(InstanceSpec("o", "other", latency=STEP, role=Role.DECODE))
    made.handle([up("p", Role.PREFILL), up("c", Role.COLLOCATED), other], 0.0)
    assert places(made.handle([done("a")], 0.0)) == []
    made.handle([up("c", Role.PREFILL), done("b")], 0.5)
    assert places(made.handle([up("c")], 1.0)) == [("b", "c")]


def test_a_draining_instance_takes_nothing_and_sleeping_ones_neither():
    made = migrator(decoders=2)
    made.handle([ev.InstanceDraining("d0"), ev.Telemetry("d1", Load(0.0, awake=False))], 0.0)
    assert places(made.handle([done("a")], 0.0)) == []
    assert places(made.handle([ev.Telemetry("d1", Load(1.0))], 1.0)) == [("a", "d1")]


@pytest.mark.parametrize("name", list(MIGRATIONS))
def test_placements_say_what_they_are_and_change_nothing(name):
    placement = MIGRATIONS[name]()
    assert placement.name == name
    assert len(MIGRATIONS[name].__doc__) > 40
    made = migrator(migration={"name": name}, decoders=2)
    instances = list(made._roster.instances.values())
    stage = Prefilled(request("a"), 0.0)
    before = [(w.outstanding, w.waiting_tokens, w.last_sent) for w in instances]
    choice = placement.choose(stage, instances, 0.0)
    assert choice.instance in instances
    assert placement.choose(stage, list(reversed(instances)), 0.0) == choice
    assert placement.choose(stage, [], 0.0) is None
    assert before == [(w.outstanding, w.waiting_tokens, w.last_sent) for w in instances]


def test_the_hopeless_wait_for_all_who_can_still_make_it():
    """One slot: `lost` (pace below any step) is first by TPOT, `fine` comes later and goes first."""
    made = migrator(slots=1)
    made.handle([done("running", tpot=0.05, output=100)], 0.0)
    commit(made, "running")
    made.handle([done("lost", tpot=0.001)], 0.0)
    made.handle([done("fine", 0.1, tpot=0.1, output=100)], 0.1)
    assert made.waiting() == 2
    assert places(made.handle([ev.Finished("running", 100)], 0.2)) == [("fine", "d0")]
    commit(made, "fine", now=0.2)
    assert places(made.handle([ev.Finished("fine", 100)], 1.0)) == [("lost", "d0")]


def test_the_context_still_to_come_counts():
    """10 ms + 0.01 ms a token: a prompt of 500 takes 15 ms now, and 20 ms half-way through 1,000 tokens."""
    for growth, expected in ((0.0, [("a", "d0")]), (0.5, [])):
        made = build_migrator("hyperflexis", {"migration": {"growth": growth}})
        slow = LatencyCoefficients(0.01, 1e-4, 0.0, 0.01, 1e-5, 0.0)
        made.handle([ev.InstanceUp(InstanceSpec("d0", "m", latency=slow, role=Role.DECODE))], 0.0)
        assert places(made.handle([done("a", prompt=500, output=1000, tpot=0.018)], 0.0)) == expected


def test_grouping_keeps_loose_ones_away_from_tight_ones():
    made = migrator(decoders=2, migration={"name": "tpot_grouped"})
    assert places(made.handle([done("tight", tpot=0.03), done("loose", tpot=0.3)], 0.0)) == [
        ("tight", "d0"),
        ("loose", "d1"),
    ]
    assert places(made.handle([done("tight2", tpot=0.03), done("loose2", tpot=0.3)], 0.0)) == [
        ("tight2", "d0"),
        ("loose2", "d1"),
    ]


def test_who_has_the_least_time_for_its_answer_is_placed_first_whatever_its_pace():
    """60 tokens at 0.5 s have 30 s, 9 at 0.9 s have 8: with one place the second gets it."""
    long, short = done("long", output=61, tpot=0.5), done("short", output=10, tpot=0.9)
    for name, first in (("tpot_grouped", "short"), ("tpot_budget", "long")):
        made = migrator(decoders=1, migration={"name": name}, slots=1)
        assert places(made.handle([long, short], 0.0)) == [(first, "d0")]


def full(overrides=None):
    """One decode instance of the reference engine whose only slot has an answer of 100 tokens (2.1 s) in it."""
    made = build_migrator("slackline", overrides)
    made.handle([up("d0", slots=1, first_token_with_kv=True)], 0.0)
    made.handle([done("first", tpot=0.05, output=100)], 0.0)
    commit(made, "first", now=0.0)
    return made


def test_who_cannot_wait_here_waits_for_its_slot_at_the_engine():
    """Its first token is due in 0.5 s and comes with its KV; its answer has 2.9 s to spare."""
    made = full()
    (place,) = of(made.handle([done("next", ttft=0.5, tpot=0.05, output=100)], 0.0), ev.Place)
    assert (place.target, place.decision.reason) == ("d0", "waits_for_slot")


def test_who_is_in_turn_goes_there_although_it_has_the_time():
    made = full()
    assert places(made.handle([done("patient", ttft=60.0, tpot=0.05, output=100)], 0.0)) == [("patient", "d0")]


def test_who_has_the_time_waits_here_while_another_before_it_cannot_go():
    """`short` is due first and cannot wait at the engine: whoever went there now would take the slot it needs."""
    made = full()
    short, patient = done("short", ttft=5.0, tpot=0.05, output=5), done("patient", ttft=60.0, tpot=0.05, output=100)
    assert places(made.handle([short, patient], 0.0)) == []


def test_as_printed_who_has_the_time_waits_here():
    made = full({"migration": {"name": "tpot_budget"}})
    assert places(made.handle([done("patient", ttft=60.0, tpot=0.05, output=100)], 0.0)) == []


def test_only_those_that_have_to_have_their_slot_sooner_are_ahead_at_the_engine():
    """Two answers of 100 tokens wait there, which is all that a third of their kind has the time for; one of 60 tokens
    has less time, goes there, and is ranked before both."""
    made = full()
    waiting = [done(f"r{i}", ttft=5.0, tpot=0.1, output=100) for i in range(2)]
    assert [name for name, _ in places(made.handle(waiting, 0.0))] == ["r0", "r1"]
    reply = made.handle(
        [done("same", ttft=6.0, tpot=0.1, output=100), done("less", ttft=4.0, tpot=0.1, output=60)], 0.0
    )
    (place,) = of(reply, ev.Place)
    assert place.request.id == "less"
    ranks = [sent.rank for sent in made._roster.instances["d0"].waiting.values()]
    assert ranks[-1] < min(ranks[:-1])


def test_an_answer_without_time_to_spare_does_not_wait_at_the_engine():
    made = full()
    assert places(made.handle([done("short", ttft=0.5, tpot=0.05, output=5)], 0.0)) == []


def test_an_engine_that_answers_after_a_step_gets_nobody_beyond_its_slots():
    made = migrator(slots=1)
    made.handle([done("first", tpot=0.05, output=100)], 0.0)
    commit(made, "first", now=0.0)
    assert places(made.handle([done("next", ttft=0.5, tpot=0.05, output=100)], 0.0)) == []


@pytest.mark.parametrize(("patience", "placed"), [(0.0, []), (0.5, []), (1.0, [("next", "d0")])])
def test_patience_is_the_share_of_the_time_to_spare_that_may_be_waited(patience, placed):
    """A slot is expected in about 2.1 s, and the answer has 2.9 s to spare."""
    made = full({"migration": {"name": "tpot_grouped", "patience": patience}})
    assert places(made.handle([done("next", ttft=0.5, tpot=0.05, output=100)], 0.0)) == placed


def test_patience_is_not_negative():
    with pytest.raises(ConfigError) as error:
        build_migrator("slackline", {"migration": {"name": "tpot_grouped", "patience": -1.0}})
    assert error.value.field == "patience"


def test_ranks_at_engines_are_on_the_clock_that_all_gateways_share():
    """With a full batch a step takes 52 ms, so 99 tokens at 0.1 s leave 4.752 s; 1,000 s lie between the clocks, which
    the scheduler heard before the fleet had roles."""
    made = build_scheduler("slackline")
    made.handle([ev.ClockOffset(1000.0)], 0.0)
    made.handle([up("p", Role.PREFILL), up("d0", first_token_with_kv=True)], 0.0)
    arrived = request("a", ttft=5.0, tpot=0.1, output=100)
    made.handle([ev.Arrived(arrived)], 0.0)
    (place,) = of(made.handle([ev.PrefillDone(arrived, "p", 100)], 1.0), ev.Place)
    assert place.rank == round(1e3 * (1000.0 + 1.0 + 99 * (0.1 - 0.052)))


def test_where_the_first_token_needs_a_slot_the_rank_is_when_that_is_due():
    made = build_migrator("slackline", {})
    made.handle([up("d0")], 0.0)
    (place,) = of(made.handle([done("a", ttft=5.0, tpot=0.1, output=100)], 0.0), ev.Place)
    assert place.rank == round(1e3 * (5.0 - 0.052))


def test_who_would_hold_a_slot_for_long_waits_for_one_that_is_due_little_later():
    """One slot. Both are in time whichever comes first; the long answer may hold the slot for 20 s."""
    made = migrator("slackline", slots=1)
    made.handle([done("first", tpot=0.1, output=50)], 0.0)
    commit(made, "first")
    made.handle([done("long", ttft=9.0, tpot=0.1, output=201), done("short", ttft=10.0, tpot=0.1, output=11)], 0.0)
    assert places(made.handle([ev.Finished("first", 50)], 5.0)) == [("short", "d0")]


def test_a_charge_for_slots_never_puts_off_one_that_is_due_much_sooner():
    made = migrator("slackline", slots=1)
    made.handle([done("first", tpot=0.1, output=50)], 0.0)
    commit(made, "first")
    made.handle([done("long", ttft=7.0, tpot=0.1, output=201), done("short", ttft=10.0, tpot=0.1, output=11)], 0.0)
    assert places(made.handle([ev.Finished("first", 50)], 5.0)) == [("long", "d0")]


def test_a_negative_charge_is_refused():
    with pytest.raises(ConfigError) as error:
        build_migrator("slackline", {"migration": {"charge": -0.1}})
    assert error.value.field == "charge"


@pytest.mark.parametrize(
    ("deadline", "most", "placed"),
    [
        (None, None, True),
        (0.0235 * 99, None, True),  # a step of three takes 23 ms
        (0.0225 * 99, None, False),
        (0.0235 * 99, 110, False),  # it may be longer than expected
        (0.0155 * 99, None, True),  # a deadline that it could not keep even alone does not hold it back
    ],
)
def test_a_deadline_asks_for_the_pace_that_it_leaves(deadline, most, placed):
    made = migrator()
    made.handle([done("a", tpot=0.05, output=100), done("b", tpot=0.05, output=100)], 0.0)
    asked = request("dated", ttft=60.0, tpot=0.05, output=100, deadline=deadline)
    asked.most_tokens = most
    reply = made.handle([ev.PrefillDone(asked, "p", asked.prompt_tokens)], 0.0)
    assert places(reply) == ([("dated", "d0")] if placed else [])
    made.handle([up("d1")], 0.1)
    assert made.waiting() == 0, "alone it has the pace"


def test_the_way_of_its_kv_takes_from_the_time_that_a_deadline_leaves():
    asked = request("dated", tpot=0.05, output=100, deadline=5.0)
    near, far = (Prefilled(asked, 1.0, {"d": move_s}).deadline_pace_s("d", 1.0) for move_s in (0.0, 2.02))
    assert (near, far) == (pytest.approx(4.0 / 99), pytest.approx(1.98 / 99))
    single = request("one", output=1, deadline=5.0)
    assert Prefilled(single, 1.0).deadline_pace_s("d", 1.0) == float("inf")
