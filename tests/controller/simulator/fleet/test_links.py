"""Transfers share ports max-min fairly: each is over when its bytes at its changing rate are."""

import numpy as np
import pytest

from controller.core.errors import ConfigError
from controller.simulator.network import GIGA, LinkFailure, LinkSettings, Network, NetworkTransfer, PortSpeed


def kv(name, source, target, gb, due=1e3):
    return NetworkTransfer(name, source, target, gb * GIGA, due)


def weights(name, source, target, gb, pace_gb_s=None):
    return NetworkTransfer(name, source, target, gb * GIGA, pace_gb_s=pace_gb_s)


def run(starts, network):
    """(transfer, at) to the end time of each."""
    todo, ends = sorted(starts, key=lambda s: s[1]), {}
    while todo or len(network):
        at = min(todo[0][1] if todo else np.inf, network.next_event)
        for name in network.ended(at):
            ends[name] = at
        while todo and todo[0][1] <= at:
            network.start(todo.pop(0)[0], at)
    assert network.moved_bytes == pytest.approx(sum(s[0].size for s in starts if s[0].due is not None))
    return ends


def play(starts, **settings):
    """(name, source, target, GB, at) to the end time of each."""
    network = Network(LinkSettings(bandwidth_gb_s=1.0, **settings))
    return run([(kv(*ends, gb), at) for *ends, gb, at in starts], network)


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
    network.start(kv("x", "p", "d", 1.0), 0.0)
    network.start(kv("y", "p", "d", 1.0), 0.0)
    assert network.next_event == 2.0
    assert network.touching("p") == ["x", "y"]
    assert network.cancel("y", 1.0)
    assert not network.cancel("y", 1.0)
    assert network.next_event == 1.5
    assert network.ended(1.5) == ["x"]
    assert network.next_event == np.inf
    assert network.moved_bytes == pytest.approx(1.5 * GIGA)  # half of what was cancelled


def test_three_flows_on_two_ports_by_hand():
    """x and y leave p, y and z come to d, 1 GB/s each way. All have a half until x (0.5 GB) ends at 1. Then y and z
    still share d: y (1 GB) and z (1.5 GB) have 0.5 and 1.0 left, so y ends at 2, and z, alone with 0.5, at 2.5."""
    ends = play([("x", "p", "e", 0.5, 0.0), ("y", "p", "d", 1.0, 0.0), ("z", "q", "d", 1.5, 0.0)])
    assert ends == pytest.approx({"x": 1.0, "y": 2.0, "z": 2.5})


def test_what_a_transfer_cannot_use_goes_to_the_others():
    """a, b and c come to d, a third each; x leaves p beside a, and gets the other two thirds of it."""
    starts = [("a", "p", "d", 1.0, 0.0), ("b", "q", "d", 1.0, 0.0), ("c", "r", "d", 1.0, 0.0)]
    assert play([*starts, ("x", "p", "e", 1.0, 0.0)]) == pytest.approx({"a": 3.0, "b": 3.0, "c": 3.0, "x": 1.5})


def test_a_weight_load_shares_the_port_with_kv():
    """3 GB of weights at their own 0.75 GB/s beside 1 GB of KV: a half each until the KV ends at 2; the other 2 GB of
    weights at 0.75 take until 4.667. Only KV counts as moved."""
    network = Network(LinkSettings(bandwidth_gb_s=1.0))
    ends = run([(weights("w", "p", "new", 3.0, 0.75), 0.0), (kv("x", "p", "d", 1.0), 0.0)], network)
    assert ends == pytest.approx({"x": 2.0, "w": 2.0 + 2.0 / 0.75})


def test_a_weight_load_on_an_idle_link_goes_at_its_own_pace():
    network = Network(LinkSettings(bandwidth_gb_s=1.0))
    assert run([(weights("w", "p", "new", 3.0, 0.75), 1.0)], network) == pytest.approx({"w": 5.0})


def test_with_a_flow_policy_kv_goes_before_weights_which_keep_their_floor():
    """MFS leaves weights 5 % of the port: 0.05 GB by 1/0.95 s, when the KV has come, and the rest alone."""
    network = Network(LinkSettings(bandwidth_gb_s=1.0, flow_policy="mfs"))
    ends = run([(weights("w", "p", "new", 1.0), 0.0), (kv("x", "p", "d", 1.0, due=1.5), 0.0)], network)
    assert ends["x"] == pytest.approx(1.0 / 0.95)
    assert ends["w"] == pytest.approx(2.0)


def test_behind_the_senders_port_only_classes_of_packets_have_an_order():
    """Under shortest_first, whose packets all have one class, p sends the smaller one first; on d's port x and z, of
    different senders, have equal shares, whatever their sizes."""
    network = Network(LinkSettings(bandwidth_gb_s=1.0, flow_policy="shortest_first"))
    ends = run([(kv("x", "p", "d", 1.0), 0.0), (kv("y", "p", "e", 2.0), 0.0), (kv("z", "q", "d", 3.0), 0.0)], network)
    assert ends == pytest.approx({"x": 2.0, "y": 3.0, "z": 4.0})


def test_an_empty_transfer_ends_at_once():
    network = Network(LinkSettings())
    network.start(kv("x", "p", "d", 0.0), 1.0)
    assert network.next_event == 1.0
    assert network.ended(1.0) == ["x"]
    network.start(kv("x", "p", "d", 0.0), 2.0)
    assert network.cancel("x", 2.0)
    assert network.next_event == np.inf


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
        ({"flow_policy": "karuna"}, "links.flow_policy"),
        ({"flow_policy": "mfs", "scope": "fabric"}, "links.flow_policy"),
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
        network.start(kv("x", "p", "d1", 1.0), 0.0)
        assert network.next_event == 1.0
        assert network.ended(1.0) == ["x"]
        network.start(kv("y", "p", "d2", 1.0), 1.0)
        assert network.next_event == 5.0


def test_a_wide_port_gives_the_others_what_a_narrow_end_leaves():
    """p sends at 2 GB/s, of which d2 takes 0.25: x has the other 1.75."""
    speeds = {"p": 2.0, "d1": 4.0, "d2": 0.25}
    network = Network(LinkSettings(), speeds.__getitem__)
    assert run([(kv("x", "p", "d1", 1.75), 0.0), (kv("y", "p", "d2", 1.0), 0.0)], network) == {"x": 1.0, "y": 4.0}


def test_a_ports_speed_is_positive():
    with pytest.raises(ConfigError) as raised:
        PortSpeed(0, 0.0)
    assert raised.value.field == "links.ports.bandwidth_gb_s"
