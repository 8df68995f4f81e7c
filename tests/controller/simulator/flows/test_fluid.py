"""The network's rates against progressive filling of the whole network, on random flows with ranks, caps and floors."""

import math
import random

import pytest

from controller.core.errors import ConfigError
from controller.flow.policies import Turn
from controller.simulator.flows.fluid import FluidNetwork


def filled(flows, ports):
    """Progressive filling, rank by rank: the definition of max-min fairness. `flows`: (path, turn) by name."""
    room, rates = dict(ports), dict.fromkeys(flows, 0.0)
    for rank in sorted({turn.rank for _, turn in flows.values()}):
        growing = {name for name, (_, turn) in flows.items() if turn.rank == rank}
        while growing:
            counts = {port: sum(port in flows[name][0] for name in growing) for port in ports}
            step = min(room[port] / count for port, count in counts.items() if count)
            step = min([step, *(flows[n][1].cap - rates[n] for n in growing if flows[n][1].cap is not None)])
            for name in growing:
                rates[name] += step
            for port, count in counts.items():
                room[port] -= step * count
            growing = {
                name
                for name in growing
                if all(room[port] > 1e-9 for port in flows[name][0])
                and (flows[name][1].cap is None or rates[name] < flows[name][1].cap - 1e-9)
            }
    return rates


def random_flows(rng, count, hosts):
    flows = {}
    for number in range(count):
        source, target = rng.sample(range(hosts), 2)
        path = [f"out{source}", f"in{target}"] if rng.random() < 0.8 else [f"out{source}"]
        path += ["core"] if rng.random() < 0.2 else []
        cap = rng.choice([None, None, None, 0.3, 2.0])
        flows[f"f{number}"] = (tuple(path), Turn((float(rng.randrange(3)), float(rng.randrange(2))), cap=cap))
    return flows


def port_speeds(rng, hosts):
    speeds = {f"{side}{host}": rng.choice([1.0, 4.0, 10.0]) for host in range(hosts) for side in ("out", "in")}
    return {**speeds, "core": 9.0}


@pytest.mark.parametrize("seed", range(60))
def test_rates_are_max_min_within_strict_ranks(seed):
    rng = random.Random(seed)
    ports = port_speeds(rng, 5)
    flows = random_flows(rng, rng.randint(1, 30), 5)
    made = FluidNetwork(ports)
    for name, (path, turn) in flows.items():
        made.start(name, path, 1e9, turn, 0.0)
        if rng.random() < 0.5:
            made.settle(0.0)  # from any state before
    made.settle(0.0)
    assert {name: made.rate(name) for name in flows} == pytest.approx(filled(flows, ports), rel=1e-4, abs=1e-5)


@pytest.mark.parametrize("seed", range(20))
def test_rates_stay_max_min_while_flows_come_go_and_change_their_turn(seed):
    rng = random.Random(1000 + seed)
    ports = port_speeds(rng, 5)
    flows = random_flows(rng, 20, 5)
    made = FluidNetwork(ports)
    for name, (path, turn) in flows.items():
        made.start(name, path, 1e9, turn, 0.0)
    for number in range(15):
        name = rng.choice(sorted(flows))
        if rng.random() < 0.3:
            made.cancel(name, 0.0)
            del flows[name]
        elif rng.random() < 0.5:
            flows[name] = (flows[name][0], Turn((float(rng.randrange(3)), 0.0)))
            made.turn(name, flows[name][1])
        else:
            extra = random_flows(rng, 1, 5)["f0"]
            flows[f"n{number}"] = extra
            made.start(f"n{number}", extra[0], 1e9, extra[1], 0.0)
        made.settle(0.0)
        assert {n: made.rate(n) for n in flows} == pytest.approx(filled(flows, ports), rel=1e-4, abs=1e-5)


def settled(flows, ports):
    made = FluidNetwork(ports)
    for name, (path, turn) in flows.items():
        made.start(name, path, 1e9, turn, 0.0)
    made.settle(0.0)
    return {name: made.rate(name) for name in flows}


def test_what_a_flow_cannot_use_goes_to_the_others():
    """One port of 10 shared by three flows, one of which is slowed to 1 elsewhere: the others get 4.5 each."""
    even = Turn((0.0,))
    rates = settled({"a": (("x",), even), "b": (("x",), even), "c": (("x", "y"), even)}, {"x": 10.0, "y": 1.0})
    assert rates == pytest.approx({"a": 4.5, "b": 4.5, "c": 1.0})


def test_flows_move_when_their_limits_add_up_to_a_port_but_for_rounding():
    """5.7 + 6.4 + 7.1 is a little more than 19.2 in binary, and no single one of them is too much."""
    limits = {"a": 5.7, "b": 6.4, "c": 7.1}
    made = FluidNetwork({**limits, "shared": 19.2})
    for name in limits:
        made.start(name, (name, "shared"), 1e3, Turn((0.0,)), 0.0)
    made.settle(0.0)
    assert {name: made.rate(name) for name in limits} == pytest.approx(limits)


def test_a_lower_rank_gets_what_the_higher_cannot_use():
    rates = settled({"high": (("x", "y"), Turn((0.0,))), "low": (("x",), Turn((1.0,)))}, {"x": 10.0, "y": 3.0})
    assert rates == pytest.approx({"high": 3.0, "low": 7.0})


def test_a_floor_is_kept_and_what_it_does_not_use_is_given_back():
    floor = Turn((9.0,), floor=0.05)
    first = ("x",), Turn((0.0,))
    assert settled({"a": first, "w": (("x",), floor)}, {"x": 100.0}) == pytest.approx({"a": 95.0, "w": 5.0})
    slow = settled({"a": first, "w": (("x", "y"), floor)}, {"x": 100.0, "y": 1.0})
    assert slow == pytest.approx({"a": 99.0, "w": 1.0})
    assert settled({"w": (("x",), floor)}, {"x": 100.0}) == pytest.approx({"w": 100.0})


def test_a_flow_that_stands_for_several_is_offered_as_much_as_all_of_them():
    """Three of four parts of x, or what y leaves it; nothing of its limit elsewhere is counted twice."""
    even = Turn((0.0,))
    for width, many, one in ((10.0, 7.5, 2.5), (6.0, 6.0, 4.0)):
        made = FluidNetwork({"x": 10.0, "y": width})
        made.start("many", ("x", "y"), 30.0, even, 0.0, singles=3)
        made.start("one", ("x",), 100.0, even, 0.0)
        made.settle(0.0)
        assert (made.rate("many"), made.rate("one")) == pytest.approx((many, one))


@pytest.mark.parametrize("seed", range(20))
def test_singles_share_like_as_many_flows_of_one(seed):
    rng = random.Random(2000 + seed)
    ports = port_speeds(rng, 4)
    apart, together, singles = FluidNetwork(ports), FluidNetwork(ports), {}
    for name, (path, turn) in random_flows(rng, 12, 4).items():
        singles[name] = rng.choice([1, 1, 2, 5])
        together.start(name, path, 1e9, turn._replace(cap=None), 0.0, singles[name])
        for number in range(singles[name]):
            apart.start(f"{name}.{number}", path, 1e9, turn._replace(cap=None), 0.0)
    apart.settle(0.0)
    together.settle(0.0)
    sums = {name: sum(apart.rate(f"{name}.{number}") for number in range(many)) for name, many in singles.items()}
    assert {name: together.rate(name) for name in singles} == pytest.approx(sums, rel=1e-4, abs=1e-5)


def by_class(flows):
    """(sender, receiver, turn) by name, on ports of 1.0; the rate of each."""
    ports = {port for source, target, _ in flows.values() for port in (f"out {source}", f"in {target}")}
    made = FluidNetwork(dict.fromkeys(ports, 1.0), by_class=True)
    for name, (source, target, turn) in flows.items():
        made.start(name, (f"out {source}", f"in {target}"), 1e9, turn, 0.0, own=f"out {source}")
        made.settle(0.0)
    return {name: made.rate(name) for name in flows}


def test_a_receiving_port_knows_classes_and_no_ranks():
    first, second, other = Turn((0.0, 1.0)), Turn((0.0, 2.0)), Turn((5.0,), wire_class=3)
    assert by_class({"a": ("p", "d", first), "b": ("q", "d", second)}) == pytest.approx({"a": 0.5, "b": 0.5})
    assert by_class({"a": ("p", "d", other), "b": ("q", "d", first)}) == pytest.approx({"a": 0.0, "b": 1.0})


def test_what_one_host_sends_goes_by_rank_whatever_its_class():
    """Reuse of a later layer goes before a KV transfer of level 2, although its class is a later one."""
    reuse, later = Turn((1.0, 5.0, 0.0), wire_class=6), Turn((2.0, 0.0, 9.0), wire_class=1)
    for flows in ({"a": ("p", "d", reuse), "b": ("p", "d", later)}, {"b": ("p", "d", later), "a": ("p", "d", reuse)}):
        assert by_class(flows) == pytest.approx({"a": 1.0, "b": 0.0})


@pytest.mark.parametrize("seed", range(20))
def test_ports_that_order_flows_differently_are_full_and_never_overfull(seed):
    rng = random.Random(3000 + seed)
    flows = {}
    for number in range(25):
        source, target = rng.sample(range(4), 2)
        turn = Turn((float(rng.randrange(4)), float(rng.randrange(7))), wire_class=rng.randrange(8))
        flows[f"f{number}"] = (source, target, turn)
    rates, used = by_class(flows), {}
    for name, (source, target, _) in flows.items():
        for port in (("out", source), ("in", target)):
            used[port] = used.get(port, 0.0) + rates[name]
    assert max(used.values()) <= 1.0 + 1e-5
    assert all(max(used["out", source], used["in", target]) > 1.0 - 1e-4 for source, target, _ in flows.values())


def test_ends_are_exact():
    made = FluidNetwork({"x": 10.0})
    made.start("a", ("x",), 10.0, Turn((0.0,)), 0.0)
    made.start("b", ("x",), 30.0, Turn((0.0,)), 0.0)
    made.settle(0.0)
    assert made.next_end() == pytest.approx(2.0)
    assert made.advance(2.0) == ["a"]
    made.settle(2.0)
    assert made.next_end() == pytest.approx(4.0)
    assert made.left("b", 3.0) == pytest.approx(10.0)
    assert made.advance(4.0) == ["b"]
    made.settle(4.0)
    assert made.next_end() == math.inf
    assert made.moved_bytes == pytest.approx(40.0)


def test_a_flow_moves_only_once_it_has_a_turn():
    made = FluidNetwork({"x": 10.0})
    made.start("a", ("x",), 10.0, Turn((5.0,)), 0.0)
    made.start("b", ("x",), 20.0, None, 0.0)
    made.settle(0.0)
    assert (made.rate("a"), made.rate("b"), made.rates(["b"])) == (10.0, 0.0, {"x": {math.inf: 0.0}})
    made.turn(
        "b",
        Turn((1.0,)),
    )
    made.settle(0.5)
    assert (made.rate("a"), made.rate("b"), made.next_end()) == pytest.approx((0.0, 10.0, 2.5))
    made.start("c", ("x",), 10.0, None, 0.5)
    made.cancel("c", 0.6)
    made.settle(0.6)
    assert made.advance(made.next_end()) == ["b"]


def test_a_cancelled_flow_leaves_its_end_to_no_other_of_its_id():
    made = FluidNetwork({"x": 10.0})
    made.start("a", ("x",), 10.0, Turn((0.0,)), 0.0)
    made.settle(0.0)
    made.cancel("a", 0.5)
    made.start("a", ("x",), 10.0, Turn((0.0,)), 0.5)
    made.settle(0.5)
    assert made.next_end() == pytest.approx(1.5)
    assert made.advance(1.0) == []


def test_flows_that_end_at_once_do_so_in_the_order_of_their_start():
    made = FluidNetwork({"x": 10.0})
    for name in ("late", "early", "a"):
        made.start(name, ("x",), 10.0, Turn((0.0,)), 0.0)
    made.settle(0.0)
    assert made.advance(made.next_end()) == ["late", "early", "a"]


@pytest.mark.parametrize(
    ("path", "size", "field"), [(("x",), 0.0, "size"), (("x",), -1.0, "size"), (("z",), 1.0, "path")]
)
def test_a_wrong_flow_names_its_field(path, size, field):
    with pytest.raises(ConfigError) as error:
        FluidNetwork({"x": 1.0}).start("a", path, size, Turn((0.0,)), 0.0)
    assert error.value.field == field
    with pytest.raises(ConfigError):
        FluidNetwork({"x": 0.0})
    with pytest.raises(ConfigError) as error:
        FluidNetwork({"x": 1.0}).start("a", ("x",), 1.0, Turn((0.0,)), 0.0, singles=0)
    assert error.value.field == "singles"
