"""The warm pool: who is taken, who is started, who goes."""

from itertools import permutations

import pytest

from controller.scale.capacity_plan import nearest_spares
from controller.scale.warm_pool import PoolChange, Spare, refill, share, target_size


def take(pool, instances):
    return [spare.id for spare in nearest_spares(pool, instances)]


def test_the_longest_ready_is_taken_and_none_that_still_starts():
    pool = [Spare("new", True, 9.0), Spare("starting", False, 1.0), Spare("old", True, 2.0)]
    assert take(pool, 1) == ["old"]
    assert take(pool, 5) == ["old", "new"]
    assert take([], 1) == []


def test_the_one_whose_weights_are_nearest_is_taken_first():
    pool = [Spare("disk", True, 1.0, source=2), Spare("engine", True, 2.0, source=1)]
    pool += [Spare("host", True, 9.0), Spare("host too", True, 3.0), Spare("away", False, 0.0)]
    assert take(pool, 5) == ["host too", "host", "engine", "disk"]


def test_the_pool_is_filled_up_while_nothing_loads():
    pool = [Spare("w", False, 1.0)]
    assert refill(pool, 3, room=None, busy=False) == PoolChange(2, ())
    assert refill(pool, 3, room=None, busy=True) == PoolChange(0, ())
    assert refill(pool, 3, room=0, busy=False) == PoolChange(0, ())
    assert refill(pool, 1, room=None, busy=False) == PoolChange(0, ())


def test_too_many_go_starting_ones_first_then_the_youngest_and_never_anothers():
    pool = [
        Spare("old", True, 1.0),
        Spare("young", True, 5.0),
        Spare("starting", False, 0.0),
        Spare("theirs", True, 9.0, fixed=True),
    ]
    assert refill(pool, 3, room=None, busy=False).stop == ("starting",)
    assert refill(pool, 2, room=None, busy=True).stop == ("starting", "young")
    assert refill(pool, 0, room=None, busy=False).stop == ("starting", "young", "old")


@pytest.mark.parametrize(
    ("pool", "room", "share", "headroom", "expected"),
    [
        (0, None, 1, 4, 0),  # nobody knows the devices
        (0, 3, 3, 4, 3),
        (2, 0, 2, 4, 2),  # those that are there hold theirs
        (1, 3, 2, 4, 2),
        (0, 8, 8, 2, 2),  # more could never serve
        (2, 0, 2, 1, 1),
        (0, 3, 3, -1, 0),
        (0, 1, 2, 4, 1),  # what another is about to give is not there yet
        (3, 0, 2, 4, 2),  # and is given
    ],
)
def test_who_does_not_say_keeps_what_devices_and_bound_allow(pool, room, share, headroom, expected):
    assert target_size(pool, room=room, share=share, headroom=headroom) == expected


def settled(pools, free, order):
    """The pools once every policy has looked, again and again, in this order, and each has what it wants."""
    pools = dict(pools)
    for _ in range(len(pools) + 1):
        for id in order:
            target = share(id, pools, free + sum(pools.values()))
            target = target_size(pools[id], room=free, share=target, headroom=99)
            free, pools[id] = free + pools[id] - target, target
    return pools, free


@pytest.mark.parametrize("free", range(9))
@pytest.mark.parametrize(
    "pools",
    [{7: 0}, {3: 0, 8: 0}, {3: 2, 8: 0}, {3: 0, 8: 2}, {1: 0, 2: 0, 3: 0}, {1: 0, 2: 3, 3: 1}, {1: 0, 2: 0, 3: 4}],
)
def test_all_devices_have_a_warm_one_and_the_next_look_changes_nothing(pools, free):
    devices = free + sum(pools.values())
    parts = [share(id, pools, devices) for id in pools]
    assert sum(parts) == devices, "none is left over, none promised twice"
    assert max(parts) - min(parts) <= 1
    for order in permutations(pools):
        found, left = settled(pools, free, order)
        assert (sum(found.values()), left) == (devices, 0)
        assert max(found.values()) - min(found.values()) <= 1
        assert [share(id, found, devices) for id in pools] == list(found.values())


def test_what_is_left_over_goes_by_id_unless_somebody_has_it():
    assert [share(id, {5: 0, 2: 0, 9: 0}, 5) for id in (2, 5, 9)] == [2, 2, 1]
    assert [share(id, {5: 1, 2: 0, 9: 2}, 4) for id in (2, 5, 9)] == [1, 1, 2]
    assert [share(id, {2: 0, 5: 1}, 1) for id in (2, 5)] == [0, 1], "5's is not stopped to start another like it for 2"


def test_the_parts_stay_while_one_that_was_stopped_still_holds_its_device():
    """It counts among the instances there can be, and is in nobody's pool."""
    pools = {1: 2, 2: 2, 3: 0}
    assert [share(id, pools, 4) for id in pools] == [2, 1, 1]
    assert [share(id, {**pools, 2: 1}, 4) for id in pools] == [2, 1, 1]
