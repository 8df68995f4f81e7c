"""Which instance a stage gives to the other."""

from dataclasses import replace

from controller.scale import FleetObservation, Member, ScalingConfig
from controller.scale.role_changes import SwitchRole, instance_to_give, role_change, spare_since

PREFILL = ScalingConfig("m", role="prefill", min_instances=1, max_instances=6)
DECODE = ScalingConfig("m", role="decode", min_instances=1, max_instances=6)


def fleet(*utilisations, state="ready", **other):
    members = [Member(f"i{n}", state, u, int(10 * u)) for n, u in enumerate(utilisations)]
    return FleetObservation(tuple(members), age_s=0.1, **other)


def test_it_gives_the_instance_with_least_to_do_while_the_rest_stays_below_upper():
    assert instance_to_give(DECODE, fleet(0.5, 0.1, 0.3)).id == "i1"  # 0.3 x 3 / 2 = 0.45
    assert instance_to_give(DECODE, fleet(0.6, 0.6)) is None  # 0.6 x 2 / 1 = 1.2


def test_it_gives_none_that_the_rest_needs_to_be_no_more_than_full():
    lax = replace(DECODE, upper=2.0)
    assert instance_to_give(lax, fleet(0.6, 0.6)) is None
    assert instance_to_give(lax, fleet(0.4, 0.4)).id == "i0"
    assert instance_to_give(lax, replace(fleet(0.4, 0.4), counted_s=1.0)) is None, "that is 0.18 of it"


def test_it_keeps_its_minimum_and_its_last_one():
    assert instance_to_give(replace(DECODE, min_instances=2), fleet(0.0, 0.0)) is None
    assert instance_to_give(replace(DECODE, min_instances=0), fleet(0.0)) is None
    assert instance_to_give(DECODE, fleet()) is None


def test_it_gives_nothing_while_the_last_change_has_not_shown():
    starting = replace(fleet(0.1, 0.1, 0.1), members=(*fleet(0.1, 0.1, 0.1).members, Member("new", "starting")))
    assert instance_to_give(DECODE, starting) is None
    assert instance_to_give(DECODE, replace(fleet(0.1, 0.1), age_s=60)) is None


def test_what_waits_before_the_stage_counts_too():
    assert instance_to_give(DECODE, fleet(0.1, 0.1, wait_over_slo=2.0)) is None


def test_only_what_can_serve_the_other_stage_is_given_whoever_runs_it():
    """Load 0.2, so two of three suffice: 0.2 x 3 / 2 = 0.3. The idlest cannot turn; of those that can `b` has less."""
    members = (
        Member("a", "ready", 0.0, 0, takes_both_roles=False),
        Member("b", "ready", 0.2, 2, fixed=True),
        Member("c", "ready", 0.4, 4),
    )
    assert instance_to_give(DECODE, FleetObservation(members, age_s=0.1)).id == "b"
    none_turns = tuple(replace(member, takes_both_roles=False) for member in members)
    assert instance_to_give(DECODE, FleetObservation(none_turns, age_s=0.1)) is None


def test_what_requests_need_is_not_given():
    members = (Member("a", "ready", needed=True), Member("b", "ready", 0.3, 3))
    assert instance_to_give(PREFILL, FleetObservation(members, age_s=0.2)).id == "b"
    alone = tuple(replace(member, needed=True) for member in members)
    assert instance_to_give(PREFILL, FleetObservation(alone, age_s=0.2)) is None


def test_ours_that_cannot_turn_is_not_given_though_it_may_be_stopped():
    members = (Member("a", "ready", takes_both_roles=False), Member("b", "ready", takes_both_roles=False))
    assert instance_to_give(DECODE, FleetObservation(members, age_s=0.1)) is None


def test_the_decision_says_from_where_to_where():
    action, decision = role_change(DECODE, fleet(0.1, 0.2), 0.0, PREFILL, 1.5, 20.0)
    assert action == SwitchRole("i0", "prefill")
    assert (decision.kind, decision.at, decision.subject) == ("role_change", 20.0, "m/decode")
    assert (decision.figures["to"], decision.figures["wanting_load"]) == ("prefill", 1.5)
    assert role_change(DECODE, fleet(0.9, 0.9), 0.0, PREFILL, float("inf"), 20.0) is None


def test_a_moments_calm_moves_nothing():
    """DECODE holds for 15 s of 1 s ticks."""
    calm = fleet(0.1, 0.2)
    assert role_change(DECODE, calm, None, PREFILL, 1.5, 20.0) is None
    assert role_change(DECODE, calm, 10.0, PREFILL, 1.5, 20.0) is None
    assert role_change(DECODE, calm, 6.0, PREFILL, 1.5, 20.0) is not None


def test_the_hold_runs_while_it_could_spare_one_and_starts_over_when_it_could_not():
    assert spare_since(None, DECODE, fleet(0.1, 0.2), 3.0) == 3.0
    assert spare_since(3.0, DECODE, fleet(0.1, 0.2), 4.0) == 3.0
    assert spare_since(3.0, DECODE, fleet(0.9, 0.9), 5.0) is None
