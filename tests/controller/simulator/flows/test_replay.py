"""Recorded transfers under each flow policy."""

from controller.flow.gate import GATED
from controller.simulator.flows.replay import RecordedTransfer, replay_transfers


def by_policy(transfers, bandwidth=1e6):
    return {each.policy: each for each in replay_transfers(transfers, bandwidth)}


def test_an_urgent_transfer_behind_a_large_one_is_in_time_only_where_deadlines_count():
    large = RecordedTransfer("large", 0.0, 100.0, 10e6, "a", "b")
    urgent = RecordedTransfer("urgent", 1.0, 5.5, 4e6, "a", "c")
    small = [RecordedTransfer(f"s{n}", 1.0, 100.0, 1e6, "a", "d") for n in range(3)]
    found = by_policy([large, urgent, *small])
    assert {name: each.in_time for name, each in found.items()} == {
        "mfs": 5, "fair_sharing": 4, "shortest_first": 4, "earliest_deadline": 5,
    }  # fmt: skip


def test_alone_each_takes_its_size_over_the_bandwidth():
    for each in by_policy([RecordedTransfer("one", 7.0, 9.5, 2e6, "a", "b")]).values():
        assert (each.in_time, round(each.mean_s, 6), round(each.p95_s, 6)) == (1, 2.0, 2.0)


def test_links_of_other_hosts_are_their_own():
    apart = [RecordedTransfer(f"t{n}", 0.0, 1.1, 1e6, f"a{n}", f"b{n}") for n in range(3)]
    assert {each.in_time for each in by_policy(apart).values()} == {3}


def test_each_policy_that_can_be_chosen_is_replayed_and_nothing_gives_nothing():
    one = [RecordedTransfer("one", 0.0, 1.0, 1.0, "a", "b")]
    assert [each.policy for each in replay_transfers(one, 1.0)] == list(GATED)
    assert replay_transfers([], 1.0) == []
