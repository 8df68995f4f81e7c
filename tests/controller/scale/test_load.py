"""Load metric: worked example H11, and what a thin window may say."""

import math

import pytest

from controller.scale import FleetObservation, Member, load_metric, processing_rate


@pytest.mark.parametrize(
    ("utilisations", "waits", "arrival_rate", "service_rate", "expected"),
    [
        ([0.9, 0.7], [0.5], 12, 10, 1.2),  # H11
        ([0.2, 0.3], [0.1], 2, 10, 0.25),  # H11
        ([0.9, 0.7], [1.7], 12, 10, 1.7),
        ([], [], 0, 0, 0.0),
        ([0.1], [], 1, 0, math.inf),  # arrivals, and nothing is processed
        ([0.1], [], 0, 0, 0.1),
        ([0.1], [], 5, None, 0.1),  # the rate is unknown
    ],
)
def test_load_is_the_largest_signal(utilisations, waits, arrival_rate, service_rate, expected):
    assert load_metric(utilisations, waits, arrival_rate, service_rate) == pytest.approx(expected)


def test_a_few_requests_on_an_idle_fleet_are_no_overload():
    # 3 arrived in 10 s, 2 of them finished: the plain quotient would say 1.5
    assert processing_rate(finished_rate=0.2, utilisation=0.1, queued=0) is None


def test_finished_at_a_tenth_of_the_fleet_means_ten_times_the_capability():
    assert processing_rate(finished_rate=4.0, utilisation=0.1, queued=0) == pytest.approx(40.0)


def test_a_full_fleet_processes_what_it_finishes():
    assert processing_rate(finished_rate=10.0, utilisation=1.0, queued=30) == pytest.approx(10.0)


def test_a_rise_of_traffic_that_finds_room_is_no_overload():
    """60/s arrive where 10/s were finished so far, nothing waits, three tenths are in use: room for 200/s."""
    assert processing_rate(10.0, 0.3, queued=0, arrival_rate=60.0) == pytest.approx(200.0)
    assert processing_rate(10.0, 0.3, queued=1, arrival_rate=60.0) == pytest.approx(10.0 / 0.3)
    assert processing_rate(10.0, 0.3, queued=0, arrival_rate=4.0) == pytest.approx(10.0 / 0.3)


def test_a_queue_with_nothing_finished_is_overload():
    rate = processing_rate(finished_rate=0.0, utilisation=1.0, queued=7)
    assert load_metric([1.0], [0.2], 3.0, rate) == math.inf


def test_draining_and_starting_instances_do_not_count_as_utilised():
    members = (Member("a", "ready", 0.6), Member("b", "draining", 0.1), Member("c", "starting", 0.0))
    assert FleetObservation(members, age_s=0.5).load == pytest.approx(0.6)


@pytest.mark.parametrize(("age_s", "stale"), [(None, True), (1.4, False), (1.6, True)])
def test_a_snapshot_older_than_three_periods_is_stale(age_s, stale):
    assert FleetObservation((), age_s=age_s, period_s=0.5).stale is stale


def test_figures_tell_an_infinite_ratio_as_unknown_number():
    seen = FleetObservation((Member("a", "ready", 0.5),), age_s=0.1, arrival_rate=2.0, processing_rate=0.0)
    assert seen.figures()["load"] is None
    assert seen.figures()["processing_rate"] == 0.0


@pytest.mark.parametrize(
    ("members", "taken", "load"),
    [
        ((), False, math.inf),
        ((Member("a", "draining"),), False, math.inf),
        ((Member("a", "starting"),), False, 0.1),
        ((Member("a", "ready"),), False, 0.1),
        ((), True, 0.1),
    ],
    ids=["none", "it drains", "one starts", "one serves", "the other stage takes it"],
)
def test_what_waits_where_no_instance_serves_or_starts_is_load_without_bound(members, taken, load):
    """Its arrival may no longer count, and it may be far from its target."""
    seen = FleetObservation(members, age_s=0.0, wait_over_slo=0.1, queued=1, taken=taken)
    assert seen.load == load


@pytest.mark.parametrize(
    ("speeds", "gone", "load"),
    [
        ((1.0, 1.0), 0, 0.4),
        ((1.0, 1.4), 0, 0.4),  # of one kind, as each was measured
        ((4.0, 0.0), 0, 0.4),  # one is not known
        ((4.0, 1.0), 0, 1.3),  # 4 x 0.3 + 1 x 0.1 of what the slow one can do
        ((4.0, 1.0), 1, 0.325),
    ],
)
def test_the_load_without_an_instance_counts_what_each_can_do(speeds, gone, load):
    members = tuple(
        Member(name, "ready", busy, speed=speed) for name, busy, speed in zip("ab", (0.3, 0.1), speeds, strict=True)
    )
    seen = FleetObservation(members, age_s=0.0)
    assert seen.load_without(members[gone]) == pytest.approx(load)


def test_the_highest_load_of_late_counts_where_instances_are_unlike():
    quick, slow = Member("quick", "ready", 0.1, speed=4.0), Member("slow", "ready", 0.1, speed=1.0)
    seen = FleetObservation((quick, slow), age_s=0.0)
    assert seen.load_without(quick, 0.2) == pytest.approx(1.0)
    assert seen.load_without(slow, 0.2) == pytest.approx(0.25)
    assert FleetObservation((quick,), age_s=0.0).load_without(quick) == math.inf


@pytest.mark.parametrize(("counted_s", "load"), [(None, 0.2), (60.0, 0.2), (5.0, 0.316), (1.0, 1.103), (0.0, 1.103)])
def test_what_was_counted_for_a_moment_is_a_part_of_the_load(counted_s, load):
    """1 - exp(-1/5) = 0.18 of the load shows in the first second."""
    seen = FleetObservation((Member("a", "ready", 0.2), Member("b", "ready", 0.2)), age_s=0.1, counted_s=counted_s)
    assert seen.load == pytest.approx(0.2)
    assert seen.whole_load == pytest.approx(load, abs=0.001)
    assert seen.load_without(seen.members[0]) == pytest.approx(2 * load, abs=0.002)
