"""Transfers share bandwidth evenly: each is over when its bytes at its changing rate are."""

import numpy as np
import pytest

from controller.core.errors import ConfigError
from controller.simulator.network import GIGA, LinkFailure, LinkSettings, Network, PortSpeed


def play(starts, **settings):
    """(name, source, target, GB, at) to the end time of each."""
    network = Network(LinkSettings(bandwidth_gb_s=1.0, **settings))
    todo, ends = sorted(starts, key=lambda s: s[4]), {}
    while todo or len(network):
        at = min(todo[0][4] if todo else np.inf, network.next_end)
        for name in network.ended(at):
            ends[name] = at
        while todo and todo[0][4] <= at:
            name, source, target, size, _ = todo.pop(0)
            network.start(name, source, target, size * GIGA, at)
    assert network.moved_bytes == pytest.approx(sum(s[3] for s in starts) * GIGA)
    return ends


def test_one_transfer_has_the_whole_link():
    assert play([("x", "p", "d", 2.0, 1.0)]) == {"x": 3.0}


def test_two_from_one_port_have_half_each_until_one_ends():
    """1 GB and 2 GB together: at half the rate the first ends at 2; 1 GB of the second is left, alone: 3."""
    assert play([("x", "p", "d1", 1.0, 0.0), ("y", "p", "d2", 2.0, 0.0)]) == {"x": 2.0, "y": 3.0}


def test_two_into_one_port_share_it_too():
    assert play([("x", "p1", "d", 1.0, 0.0), ("y", "p2", "d", 1.0, 0.0)]) == {"x": 2.0, "y": 2.0}


def test_one_that_comes_later_slows_the_first_from_then_on():
    """x has sent 0.5 of 1 GB at 0.5; the rest at half the rate takes 1 s."""
    ends = play([("x", "p", "d1", 1.0, 0.0), ("y", "p", "d2", 2.0, 0.5)])
    assert ends == {"x": 1.5, "y": 3.0}


def test_directions_and_pairs_and_one_fabric():
    starts = [("x", "a", "b", 1.0, 0.0), ("y", "b", "a", 1.0, 0.0)]
    assert play(starts) == {"x": 1.0, "y": 1.0}
    same_port = [("x", "p", "d1", 1.0, 0.0), ("y", "p", "d2", 1.0, 0.0)]
    assert play(same_port, scope="pair") == {"x": 1.0, "y": 1.0}
    assert play(starts, scope="fabric") == {"x": 2.0, "y": 2.0}


def test_a_cancelled_transfer_gives_its_share_back():
    network = Network(LinkSettings(bandwidth_gb_s=1.0))
    network.start("x", "p", "d", GIGA, 0.0)
    network.start("y", "p", "d", GIGA, 0.0)
    assert network.touching("p") == ["x", "y"]
    assert network.cancel("y", 1.0)
    assert not network.cancel("y", 1.0)
    assert network.next_end == 1.5
    assert network.ended(1.5) == ["x"]
    assert network.next_end == np.inf


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("scope", ["port", "pair", "fabric"])
def test_no_port_carries_more_than_its_bandwidth_and_no_one_is_slower_than_alone_with_all(seed, scope):
    rng = np.random.default_rng(seed)
    starts = [
        (f"t{i}", f"p{rng.integers(3)}", f"d{rng.integers(3)}", float(rng.uniform(0.1, 2)), float(rng.uniform(0, 5)))
        for i in range(30)
    ]
    ends = play(starts, scope=scope)
    assert set(ends) == {start[0] for start in starts}
    for name, _, _, size, at in starts:
        assert ends[name] >= at + size - 1e-9
    for port in ("p0", "p1", "p2"):
        mine = [start for start in starts if start[1] == port]
        if mine and scope == "port":
            assert max(ends[s[0]] for s in mine) - min(s[4] for s in mine) >= sum(s[3] for s in mine) - 1e-6


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"bandwidth_gb_s": 0}, "links.bandwidth_gb_s"),
        ({"latency_s": -1}, "links.latency_s"),
        ({"scope": "moon"}, "links.scope"),
        ({"layers": 0}, "links.layers"),
    ],
)
def test_bad_settings_are_refused(change, field):
    with pytest.raises(ConfigError) as caught:
        LinkSettings(**change)
    assert caught.value.field == field


def test_bad_failures_are_refused():
    with pytest.raises(ConfigError, match="positive"):
        LinkFailure(0, 1.0, 0.0)
    with pytest.raises(ConfigError, match="negative"):
        LinkFailure(0, -1.0, 1.0)


def test_ports_may_differ_and_the_narrower_of_two_decides():
    """p sends at 2 GB/s, d1 takes 1, d2 takes 0.25: alone each transfer is as fast as the narrower end."""
    speeds = {"p": 2.0, "d1": 1.0, "d2": 0.25}
    for scope in ("port", "pair"):
        network = Network(LinkSettings(bandwidth_gb_s=9.0, scope=scope), speeds.__getitem__)
        network.start("x", "p", "d1", GIGA, 0.0)
        assert network.next_end == 1.0
        assert network.ended(1.0) == ["x"]
        network.start("y", "p", "d2", GIGA, 1.0)
        assert network.next_end == 5.0


def test_a_wide_port_gives_each_of_its_transfers_its_share():
    """p's 2 GB/s are two halves of 1; d2 takes 0.25 of its half."""
    speeds = {"p": 2.0, "d1": 4.0, "d2": 0.25}
    network = Network(LinkSettings(), speeds.__getitem__)
    network.start("x", "p", "d1", GIGA, 0.0)
    network.start("y", "p", "d2", GIGA, 0.0)
    assert network.next_end == 1.0


def test_a_ports_speed_is_positive():
    with pytest.raises(ConfigError) as raised:
        PortSpeed(0, 0.0)
    assert raised.value.field == "links.ports.bandwidth_gb_s"
