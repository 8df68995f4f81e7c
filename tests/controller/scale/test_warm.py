"""The warm pool: who is taken, who is started, who goes."""

import pytest

from controller.scale.warm import PoolChange, WarmInstance, fill, take, wanted


def test_the_longest_ready_is_taken_and_none_that_still_starts():
    pool = [WarmInstance("new", True, 9.0), WarmInstance("starting", False, 1.0), WarmInstance("old", True, 2.0)]
    assert take(pool, 1) == ["old"]
    assert take(pool, 5) == ["old", "new"]
    assert take([], 1) == []


def test_the_one_whose_weights_are_nearest_is_taken_first():
    pool = [WarmInstance("disk", True, 1.0, source=2), WarmInstance("engine", True, 2.0, source=1)]
    pool += [WarmInstance("host", True, 9.0), WarmInstance("host too", True, 3.0), WarmInstance("away", False, 0.0)]
    assert take(pool, 5) == ["host too", "host", "engine", "disk"]


def test_the_pool_is_filled_up_while_nothing_loads():
    pool = [WarmInstance("w", False, 1.0)]
    assert fill(pool, 3, startable=True, busy=False) == PoolChange(2, ())
    assert fill(pool, 3, startable=True, busy=True) == PoolChange(0, ())
    assert fill(pool, 3, startable=False, busy=False) == PoolChange(0, ())
    assert fill(pool, 1, startable=True, busy=False) == PoolChange(0, ())


def test_too_many_go_starting_ones_first_then_the_youngest_and_never_anothers():
    pool = [
        WarmInstance("old", True, 1.0),
        WarmInstance("young", True, 5.0),
        WarmInstance("starting", False, 0.0),
        WarmInstance("theirs", True, 9.0, fixed=True),
    ]
    assert fill(pool, 3, startable=True, busy=False).stop == ("starting",)
    assert fill(pool, 2, startable=True, busy=True).stop == ("starting", "young")
    assert fill(pool, 0, startable=True, busy=False).stop == ("starting", "young", "old")


@pytest.mark.parametrize(
    ("pool", "room", "sharers", "headroom", "expected"),
    [
        (0, None, 1, 4, 0),  # nobody knows the devices
        (0, 3, 1, 4, 3),
        (2, 0, 1, 4, 2),  # those that are there hold theirs
        (1, 3, 2, 4, 2),
        (0, 8, 1, 2, 2),  # more could never serve
        (2, 0, 1, 1, 1),
        (0, 3, 1, -1, 0),
    ],
)
def test_who_does_not_say_keeps_what_devices_and_bound_allow(pool, room, sharers, headroom, expected):
    assert wanted(pool, room=room, sharers=sharers, headroom=headroom) == expected
