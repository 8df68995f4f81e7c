"""The capacity plan: which source gives the next instance, and what becomes of those that are not needed."""

from dataclasses import replace

import pytest

from controller.scale import Drain, FleetObservation, Member, ScaleOut, Scaler, ScalerMemory, ScalingConfig, Undrain
from controller.scale.capacity_plan import (
    LoadWeights,
    OtherStage,
    PutToSleep,
    StageCapacity,
    StartNew,
    WakeUp,
    plan_capacity,
)
from controller.scale.role_changes import SwitchRole
from controller.scale.warm_pool import Spare, SpareSource, weight_source

NOW = 1000.0
PREFILL = ScalingConfig("m", role="prefill", min_instances=1, max_instances=6, sustain_s=5.0, cooldown_s=10.0)
DECODE = replace(PREFILL, role="decode")
ALONE = replace(PREFILL, role="collocated")


def fleet(*utilisations, draining=(), **other):
    members = [Member(f"i{n}", "ready", u, int(10 * u)) for n, u in enumerate(utilisations)]
    members += [Member(id, "draining", 0.2, 3) for id in draining]
    return FleetObservation(tuple(members), age_s=0.1, **other)


BUSY = fleet(0.95)
SPARE = ScalerMemory(ticks=9, low_since=NOW - 60, changed_at=NOW - 90, mind="at_max", spare_since=NOW - 60)
CALM = OtherStage(DECODE, fleet(0.2, 0.1, 0.3), SPARE)
LIGHT = Spare("light sleeper", True, 3.0, source=SpareSource.HOST_COPY, sleep_level=1)
WARM = Spare("warm", True, 2.0, source=SpareSource.ENGINE)
DEEP = Spare("deep sleeper", True, 1.0, source=SpareSource.DISK, sleep_level=2)
ALL = StageCapacity(PREFILL, BUSY, spares=(DEEP, WARM, LIGHT), other=CALM, room=2)
IN_ORDER = (
    SwitchRole("i1", "prefill"),
    WakeUp("light sleeper", 1),
    LoadWeights("warm"),
    WakeUp("deep sleeper", 2),
    StartNew(),
    StartNew(),
)


def steps(stage, *decided):
    return plan_capacity(stage, decided, NOW).steps


# ---- the order of preference ----------------------------------------------------------------------------------------


def test_all_sources_together_give_in_order_of_speed():
    assert steps(ALL, ScaleOut(6)) == IN_ORDER


def test_a_sleeper_that_requests_need_comes_before_the_other_stage_and_before_nearer_weights():
    needed = replace(ALL, spares=(DEEP._replace(needed=True), WARM, LIGHT))
    assert steps(needed, ScaleOut(1)) == (WakeUp("deep sleeper", 2),)
    assert needed.observation(NOW).needed_asleep
    assert not ALL.observation(NOW).needed_asleep
    starting = replace(ALL, spares=(DEEP._replace(needed=True, ready=False),))
    assert not starting.observation(NOW).needed_asleep


@pytest.mark.parametrize("asked", range(len(IN_ORDER) + 1))
def test_so_many_as_are_asked_for_and_no_more(asked):
    assert steps(ALL, ScaleOut(asked)) == IN_ORDER[:asked]


def test_what_no_source_has_is_missing_until_a_later_tick():
    assert steps(ALL, ScaleOut(60)) == IN_ORDER


@pytest.mark.parametrize(
    ("without", "first"),
    [
        ({"other": None}, WakeUp("light sleeper", 1)),
        ({"other": None, "spares": (DEEP, WARM)}, LoadWeights("warm")),
        ({"other": None, "spares": (DEEP,)}, WakeUp("deep sleeper", 2)),
        ({"other": None, "spares": ()}, StartNew()),
    ],
)
def test_with_a_source_exhausted_the_next_one_gives(without, first):
    assert steps(replace(ALL, **without), ScaleOut(1)) == (first,)


def test_with_every_source_exhausted_nothing_comes():
    empty = replace(ALL, other=None, spares=(), room=0)
    assert steps(empty, ScaleOut(3)) == ()
    assert not empty.can_add(NOW)


@pytest.mark.parametrize(("room", "started"), [(0, 0), (1, 1), (2, 2), (None, 3)])
def test_free_devices_bound_new_processes_only(room, started):
    plan = plan_capacity(StageCapacity(ALONE, BUSY, room=room), [ScaleOut(3)], NOW)
    assert (plan.new, plan.steps) == (started, (StartNew(),) * started)
    assert steps(StageCapacity(ALONE, BUSY, spares=(WARM,), room=room), ScaleOut(1)) == (LoadWeights("warm"),)


def test_a_spare_whose_process_still_starts_is_not_counted_on():
    starting = StageCapacity(ALONE, BUSY, spares=(WARM._replace(ready=False),), room=0)
    assert steps(starting, ScaleOut(1)) == ()
    assert not starting.can_add(NOW)
    assert replace(starting, spares=(WARM,)).can_add(NOW)


def test_spares_equally_near_are_taken_in_the_order_in_which_they_have_waited():
    spares = (WARM._replace(id="b", since=5.0), WARM._replace(id="c", since=4.0), WARM._replace(id="a", since=5.0))
    taken = steps(StageCapacity(ALONE, BUSY, spares=spares), ScaleOut(3))
    assert taken == (LoadWeights("c"), LoadWeights("a"), LoadWeights("b"))


@pytest.mark.parametrize(
    ("sleep_level", "copies", "engine_ready", "source"),
    [
        (1, False, False, SpareSource.HOST_COPY),
        (1, True, True, SpareSource.HOST_COPY),
        (2, True, True, SpareSource.ENGINE),
        (2, True, False, SpareSource.DISK),
        (2, False, True, SpareSource.DISK),
        (0, True, True, SpareSource.ENGINE),
        (0, True, False, SpareSource.DISK),
    ],
)
def test_how_near_the_weights_of_a_spare_are(sleep_level, copies, engine_ready, source):
    assert weight_source(sleep_level=sleep_level, copies=copies, engine_ready=engine_ready) is source


# ---- both stages ----------------------------------------------------------------------------------------------------


def test_decode_takes_from_prefill_as_prefill_from_decode():
    decode = StageCapacity(DECODE, BUSY, other=OtherStage(PREFILL, CALM.seen, SPARE), room=1)
    plan = plan_capacity(decode, [ScaleOut(1)], NOW)
    assert plan.steps == (SwitchRole("i1", "decode"),)
    assert (plan.role_change.kind, plan.role_change.reason) == ("role_change", "demand_diverged")
    assert plan.role_change.subject == "m/prefill"
    assert plan.role_change.figures["wanting_load"] == 0.95


def test_the_other_stage_gives_one_however_many_are_asked_for():
    plan = plan_capacity(replace(ALL, spares=(), room=None), [ScaleOut(3)], NOW)
    assert plan.steps == (SwitchRole("i1", "prefill"), StartNew(), StartNew())


def test_the_hold_and_cool_down_of_a_stage_that_gave_start_over():
    """What it thinks and how often it ticked stays; only so does its next tick continue its own."""
    plan = plan_capacity(ALL, [ScaleOut(1)], NOW)
    assert plan.giving == ScalerMemory(ticks=9, low_since=None, changed_at=NOW, mind="at_max", spare_since=None)
    after = OtherStage(DECODE, CALM.seen, plan.giving)
    assert replace(ALL, other=after).role_change(NOW) is None
    giving = StageCapacity(DECODE, fleet(0.1, 0.1))
    memory, actions, _ = Scaler().decide(DECODE, plan.giving, giving.observation(NOW + 1), NOW + 1)
    assert (actions, memory.low_since, memory.spare_since) == ([], NOW + 1, NOW + 1)


@pytest.mark.parametrize(
    "other",
    [
        CALM._replace(memory=ScalerMemory()),
        CALM._replace(memory=ScalerMemory(spare_since=NOW - 3)),  # its hold is 5 s, of ticks of 1 s
        CALM._replace(seen=fleet(0.7, 0.7)),
        CALM._replace(config=replace(DECODE, min_instances=3)),
        CALM._replace(seen=replace(CALM.seen, age_s=60.0)),
    ],
)
def test_a_stage_that_cannot_spare_an_instance_keeps_it(other):
    stage = replace(ALL, other=other, spares=())
    plan = plan_capacity(stage, [ScaleOut(1)], NOW)
    assert (plan.steps, plan.role_change, plan.giving) == ((StartNew(),), None, None)
    assert not replace(stage, room=0).can_add(NOW)


# ---- what is not needed ---------------------------------------------------------------------------------------------


def test_an_instance_that_is_not_needed_is_drained():
    assert steps(StageCapacity(ALONE, BUSY), Drain("i0")) == (Drain("i0"),)


def test_it_sleeps_where_the_policy_says_so_and_its_engine_can():
    stage = StageCapacity(ALONE, BUSY, sleep_level=2, sleepable=frozenset({"i0"}))
    assert steps(stage, Drain("i0")) == (PutToSleep("i0", 2),)
    assert steps(stage, Drain("i1")) == (Drain("i1"),)
    assert steps(replace(stage, sleep_level=0), Drain("i0")) == (Drain("i0"),)


def test_a_scale_in_uses_no_source():
    plan = plan_capacity(ALL, [Drain("i0")], NOW)
    assert (plan.steps, plan.new, plan.role_change) == ((Drain("i0"),), 0, None)


# ---- with the scaler: bounds, cool-downs ----------------------------------------------------------------------------


def tick(stage, state=None):
    _, actions, decision = Scaler().decide(stage.config, state or ScalerMemory(), stage.observation(NOW), NOW)
    return plan_capacity(stage, actions, NOW).steps, decision.reason if decision else ""


def test_a_drain_is_taken_back_before_any_other_source_and_without_cool_down():
    stage = replace(ALL, seen=fleet(0.95, draining=("leaving",)))
    assert tick(stage, ScalerMemory(changed_at=NOW)) == ((Undrain("leaving"),), "load_above_upper")


def test_during_the_cool_down_no_source_gives():
    assert tick(ALL, ScalerMemory(changed_at=NOW - 5)) == ((), "settling")
    assert tick(ALL, ScalerMemory(changed_at=NOW - 10)) == (IN_ORDER[:1], "load_above_upper")


def test_at_the_upper_bound_no_source_gives():
    stage = replace(ALL, config=replace(PREFILL, max_instances=1))
    assert tick(stage) == ((), "at_max")


def test_the_lower_bound_is_restored_at_once_from_all_sources():
    stage = replace(ALL, config=replace(PREFILL, min_instances=4))
    assert tick(stage, ScalerMemory(changed_at=NOW)) == (IN_ORDER[:3], "below_min")


def test_above_the_upper_bound_one_goes_to_sleep():
    seen = fleet(0.5, 0.4)
    stage = StageCapacity(
        replace(ALONE, max_instances=1), seen, sleep_level=1, sleepable=frozenset(m.id for m in seen.members)
    )
    assert tick(stage) == ((PutToSleep("i1", 1),), "above_max")


@pytest.mark.parametrize(
    ("stage", "held_by"),
    [
        (StageCapacity(ALONE, BUSY, room=0), "no_device"),
        (StageCapacity(ALONE, BUSY, pattern=False, room=None), "nothing_to_start"),
        (StageCapacity(PREFILL, BUSY, other=CALM._replace(memory=ScalerMemory()), room=0), "no_device"),
    ],
)
def test_without_any_source_the_scaler_says_why(stage, held_by):
    assert tick(stage) == ((), held_by)
    assert plan_capacity(stage, [ScaleOut(1)], NOW).steps == ()


def test_a_drain_is_taken_back_where_no_source_has_anything():
    stage = StageCapacity(ALONE, fleet(0.95, draining=("leaving",)), room=0)
    assert tick(stage) == ((Undrain("leaving"),), "load_above_upper")


# ---- what is recorded -----------------------------------------------------------------------------------------------


def test_the_outcome_names_every_instance_and_where_it_comes_from():
    assert plan_capacity(ALL, [ScaleOut(5)], NOW).outcome(["new-1"]) == {
        "started": ["light sleeper", "warm", "deep sleeper", "new-1"],
        "woken": {"light sleeper": {"level": 1}, "deep sleeper": {"level": 2}},
        "switched": {"instance": "i1", "from": "decode"},
    }
    sleeping = StageCapacity(ALONE, BUSY, sleep_level=1, sleepable=frozenset({"i0"}))
    assert plan_capacity(sleeping, [Drain("i0")], NOW).outcome([]) == {"asleep": ["i0"]}
    assert plan_capacity(sleeping, [Drain("i1")], NOW).outcome([]) == {}


def test_a_plan_changes_nothing_that_it_was_given_and_says_the_same_again():
    assert plan_capacity(ALL, [ScaleOut(6)], NOW) == plan_capacity(ALL, [ScaleOut(6)], NOW)
    assert ALL.spares == (DEEP, WARM, LIGHT)


@pytest.mark.parametrize(
    ("stage", "expected_s"),
    [
        ({}, 40.0),
        ({"spares": (WARM,)}, None),
        ({"spares": (WARM._replace(ready=False),)}, 40.0),
        ({"sleep_level": 1, "sleepable": frozenset({"a"})}, None),
        ({"sleep_level": 1}, 40.0),
        ({"start_s": None}, None),
    ],
)
def test_a_stopped_instance_is_replaced_by_what_serves_soonest(stage, expected_s):
    capacity = StageCapacity(**{"config": PREFILL, "seen": BUSY, "room": 2, "start_s": 40.0, **stage})
    assert capacity.observation(NOW).start_s == expected_s
