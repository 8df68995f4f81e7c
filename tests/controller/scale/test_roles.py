"""Which instance a stage gives to the other."""

from dataclasses import replace

from controller.scale import FleetObservation, Member, ScalingConfig
from controller.scale.roles import SwitchRole, spare, switch

PREFILL = ScalingConfig("m", role="prefill", min_instances=1, max_instances=6)
DECODE = ScalingConfig("m", role="decode", min_instances=1, max_instances=6)


def fleet(*utilisations, state="ready", **other):
    members = [Member(f"i{n}", state, u, int(10 * u)) for n, u in enumerate(utilisations)]
    return FleetObservation(tuple(members), age_s=0.1, **other)


def test_it_gives_the_instance_with_least_to_do_while_the_rest_stays_below_upper():
    assert spare(DECODE, fleet(0.5, 0.1, 0.3)).id == "i1"  # 0.3 x 3 / 2 = 0.45
    assert spare(DECODE, fleet(0.6, 0.6)) is None  # 0.6 x 2 / 1 = 1.2


def test_it_keeps_its_minimum_and_its_last_one():
    assert spare(replace(DECODE, min_instances=2), fleet(0.0, 0.0)) is None
    assert spare(replace(DECODE, min_instances=0), fleet(0.0)) is None
    assert spare(DECODE, fleet()) is None


def test_it_gives_nothing_while_the_last_change_has_not_shown():
    starting = replace(fleet(0.1, 0.1, 0.1), members=(*fleet(0.1, 0.1, 0.1).members, Member("new", "starting")))
    assert spare(DECODE, starting) is None
    assert spare(DECODE, replace(fleet(0.1, 0.1), age_s=60)) is None


def test_what_waits_before_the_stage_counts_too():
    assert spare(DECODE, fleet(0.1, 0.1, wait_over_slo=2.0)) is None


def test_others_instances_are_not_ours_to_give():
    members = (Member("a", "ready", fixed=True), Member("b", "ready", fixed=True))
    assert spare(DECODE, FleetObservation(members, age_s=0.1)) is None


def test_the_decision_says_from_where_to_where():
    action, decision = switch(DECODE, fleet(0.1, 0.2), PREFILL, 1.5, 7.0)
    assert action == SwitchRole("i0", "prefill")
    assert (decision.kind, decision.at, decision.subject) == ("role_change", 7.0, "m/decode")
    assert (decision.figures["to"], decision.figures["wanting_load"]) == ("prefill", 1.5)
    assert switch(DECODE, fleet(0.9, 0.9), PREFILL, float("inf"), 7.0) is None
