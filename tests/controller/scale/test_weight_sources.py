"""The order in which sources of weights are tried."""

import random

import pytest

from controller.core.errors import ConfigError
from controller.scale.weight_sources import Holder, Path, plan_sources


def holder(id, host="a", **fields):
    return Holder(id, f"http://{id}", host, **fields)


def kinds(plan):
    return [choice.id or choice.kind for choice in plan.choices]


def test_without_any_engine_the_disk_is_left():
    plan = plan_sources("new", [])
    assert (kinds(plan), plan.reason) == (["disk"], "disk_only")
    assert plan.figures == {"engines": 0, "host_copy": False}


def test_a_copy_on_the_host_comes_between_engines_and_disk():
    assert kinds(plan_sources("new", [], host_copy=True)) == ["host", "disk"]
    plan = plan_sources("new", [holder("e")], host_copy=True)
    assert kinds(plan) == ["e", "host", "disk"]
    assert plan.choices[0].url == "http://e"


def test_a_copy_that_was_kept_for_it_goes_before_engines():
    plan = plan_sources("sleeper", [holder("e")], host_copy=True, copy_first=True)
    assert (kinds(plan), plan.reason) == (["host", "e", "disk"], "host_copy")
    assert "source" not in plan.figures
    gone = plan_sources("sleeper", [holder("e", "a")], target_host="a", copy_first=True)
    assert (kinds(gone), gone.reason) == (["e", "disk"], "same_host")


@pytest.mark.parametrize(("target", "source"), [(1, 2), (2, 1), (2, 2)])
def test_parts_of_weights_are_neither_given_nor_taken(target, source):
    plan = plan_sources("new", [holder("e", ranks=source)], host_copy=True, ranks=target)
    assert (kinds(plan), dict(plan.rejected)) == (["host", "disk"], {"e": "several_ranks"})


def test_the_same_host_goes_before_any_link():
    paths = [Path("b", "a", 400e9)]
    plan = plan_sources("new", [holder("far", "b"), holder("near", "a", utilisation=0.9)], paths, target_host="a")
    assert (kinds(plan)[:2], plan.reason) == (["near", "far"], "same_host")


def test_then_the_widest_link_and_last_what_no_one_has_described():
    paths = [Path("b", "a", 10e9), Path("c", "a", 25e9), Path("d", "z", 99e9)]
    holders = [holder("b1", "b"), holder("c1", "c"), holder("d1", "d")]
    plan = plan_sources("new", holders, paths, target_host="a")
    assert (kinds(plan), plan.reason) == (["c1", "b1", "d1", "disk"], "widest_link")
    assert [choice.bandwidth_bytes_s for choice in plan.choices] == [25e9, 10e9, None, None]


def test_several_links_between_two_hosts_count_as_the_widest_that_is_up():
    paths = [Path("b", "a", 100e9, up=False), Path("b", "a", 10e9), Path("c", "a", 25e9)]
    plan = plan_sources("new", [holder("b1", "b"), holder("c1", "c")], paths, target_host="a")
    assert kinds(plan)[:2] == ["c1", "b1"]


def test_an_engine_behind_a_broken_link_is_left_out():
    plan = plan_sources("new", [holder("b1", "b")], [Path("b", "a", 10e9, up=False)], target_host="a")
    assert (kinds(plan), plan.rejected, plan.reason) == (["disk"], {"b1": "link_down"}, "disk_only")


def test_an_engine_that_the_target_cannot_reach_is_left_out():
    plan = plan_sources("new", [holder("x", reached=False), holder("y")], target_host="a")
    assert (kinds(plan)[0], plan.rejected) == ("y", {"x": "link_down"})


@pytest.mark.parametrize(
    ("better", "worse"),
    [
        ({"transfers": 0, "utilisation": 0.9}, {"transfers": 1, "utilisation": 0.1}),
        ({"utilisation": 0.2}, {"utilisation": 0.3}),
    ],
)
def test_between_equals_fewest_transfers_then_least_load(better, worse):
    plan = plan_sources("new", [holder("x", **worse), holder("y", **better)], target_host="a")
    assert kinds(plan)[:2] == ["y", "x"]


def test_ties_go_by_id_whatever_the_order_given():
    holders = [holder(f"e{number}") for number in range(5)]
    for seed in range(10):
        random.Random(seed).shuffle(holders)
        plan = plan_sources("new", holders, target_host="a")
        assert kinds(plan) == ["e0", "e1", "e2", "disk"]
        assert plan.rejected == {"e3": "enough_before", "e4": "enough_before"}


def test_unknown_hosts_are_not_the_same_host():
    plan = plan_sources("new", [holder("x", "")], target_host="")
    assert plan.reason == "link_unknown"


def test_an_engine_is_no_source_for_itself():
    assert kinds(plan_sources("new", [holder("new")], target_host="a")) == ["disk"]


def test_none_of_the_engines_may_be_wanted():
    plan = plan_sources("new", [holder("e")], target_host="a", most_engines=0)
    assert (kinds(plan), plan.rejected) == (["disk"], {"e": "enough_before"})


def test_nonsense_names_its_field():
    with pytest.raises(ConfigError, match="most_engines"):
        plan_sources("new", [], most_engines=-1)
    for bandwidth in (0, -1, float("nan"), float("inf")):
        with pytest.raises(ConfigError) as caught:
            Path("a", "b", bandwidth)
        assert caught.value.field == "bandwidth_bytes_s"
