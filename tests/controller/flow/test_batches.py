"""Worked examples M4 and M5: robust effective deadlines, feasibility and pruning."""

import itertools
import random

import pytest

from controller.core.errors import ConfigError
from controller.flow.batches import Batch, BatchRequest, effective_deadline, loose_deadlines, order_batches
from tests.controller.flow.slow_batches import order_slowly


@pytest.mark.parametrize(
    ("deadlines", "red", "loose"),
    [
        ([1, 10, 11, 12], 7.75, 10),
        ([1, 2, 3, 10], 3.25, 10),
        ([3, 9], 6, 9),
        ([7], 7, 7),
        ([5, 5, 5], 5, 5),
        ([1, 4, 7, 10], 3.25, 4),
        ([12, 1, 11, 10], 7.75, 10),
    ],
)
def test_m4_robust_effective_deadline(deadlines, red, loose):
    assert effective_deadline(deadlines) == pytest.approx((red, loose))


def test_d_lo_of_batches_in_a_row_is_that_of_each():
    """Some of one request, some of equal deadlines, some of equal gaps."""
    rng = random.Random(3)
    for _ in range(200):
        sizes = [rng.randint(1, 6) for _ in range(rng.randint(0, 8))]
        deadlines = sorted(float(rng.randint(0, 12)) for _ in range(sum(sizes)))
        ends = list(itertools.accumulate(sizes))
        each = [effective_deadline(deadlines[end - size : end]).loose for size, end in zip(sizes, ends, strict=True)]
        assert loose_deadlines(deadlines, ends) == each


def test_no_deadlines_have_no_effective_one():
    with pytest.raises(ValueError, match="no deadlines"):
        effective_deadline([])


def batches(x1=(3, 0), y1=(4, 1), exempt=()):
    def request(name, deadline, load):
        return BatchRequest(name, deadline, {"1": load[0], "2": load[1]}, name in exempt)

    x = Batch("X", "unit", 1.0, [request("x1", 4, x1), request("x2", 8, (1, 1))])
    y = Batch("Y", "unit", 1.0, [request("y1", 10, y1), request("y2", 12, (2, 3))])
    return [y, x]


EVEN = {"1": 1.0, "2": 1.0}


def test_m5_what_fits_is_not_pruned():
    found = order_batches(batches(), EVEN, 5, 0.0)
    assert found.order == ("X", "Y")
    assert found.finish_s == {"X": 5, "Y": 12}
    assert not found.pruned


def test_m5_the_largest_load_on_the_bottleneck_is_pruned():
    found = order_batches(batches(y1=(5, 1)), EVEN, 5, 0.0)
    assert found.scavengers == {"y1"}
    assert found.finish_s["Y"] == 8
    [pruned] = found.pruned
    assert (pruned.port, pruned.late_batch, pruned.finish_s, pruned.due_s) == ("1", "Y", 13, 12)


def test_m5_of_a_batch_ahead_too_but_not_as_the_text_has_it():
    found = order_batches(batches(x1=(6, 0)), EVEN, 5, 0.0)
    assert found.scavengers == {"x1"}
    assert found.finish_s == {"X": 8, "Y": 9}
    text = order_batches(batches(x1=(6, 0)), EVEN, 5, 0.0, within_batch=True)
    assert text.scavengers == {"y1"}
    assert text.finish_s["Y"] == 11


def test_m5_without_a_budget_nothing_is_pruned():
    found = order_batches(batches(x1=(6, 0)), EVEN, 0, 0.0)
    assert not found.pruned
    assert found.finish_s["Y"] == 15


def test_m5_the_bottleneck_is_the_port_with_the_most_seconds():
    found = order_batches(batches(y1=(5, 1)), {"1": 2.0, "2": 0.25}, 5, 0.0)
    assert found.scavengers == {"y2"}
    assert found.finish_s["Y"] == 10


def test_a_request_that_an_operator_forced_is_not_pruned():
    found = order_batches(batches(y1=(5, 1), exempt={"y1"}), EVEN, 5, 0.0)
    assert "y1" not in found.scavengers
    assert found.scavengers == {"x1"}


def test_pruning_ends_where_nobody_loads_the_bottleneck():
    late = Batch("L", "unit", 100.0, [BatchRequest("l", 1.0, {})])
    found = order_batches([late], EVEN, 5, 0.0)
    assert not found.pruned
    assert found.finish_s["L"] == 100.0


def test_what_is_pruned_in_vain_comes_back():
    """The forced request alone takes until 9, so nothing that is pruned saves "tight"; "loose" needs "big" pruned."""
    waiting = [
        Batch(name, "unit", 0.0, [BatchRequest(name, due, {"1": load}, name == "forced")])
        for name, due, load in (("forced", 1.0, 9.0), ("tight", 2.0, 1.0), ("big", 20.0, 8.0), ("loose", 21.0, 4.0))
    ]
    assert order_batches(waiting, EVEN, 9, 0.0).scavengers == {"tight"}
    found = order_batches(waiting, EVEN, 9, 0.0, in_vain=False)
    assert found.scavengers == {"big"}
    assert found.finish_s == {"forced": 9.0, "tight": 10.0, "big": 18.0, "loose": 14.0}


def test_a_batch_of_which_nothing_is_left_is_not_in_time():
    two = Batch("B", "unit", 0.0, [BatchRequest("x", 5.0, {"1": 6.0}), BatchRequest("y", 5.0, {"1": 6.0})])
    assert order_batches([two], EVEN, 9, 0.0).scavengers == {"x", "y"}
    assert order_batches([two], EVEN, 9, 0.0, in_vain=False).scavengers == frozenset()


def test_too_small_a_budget_prunes_nothing_in_vain():
    three = Batch("B", "unit", 0.0, [BatchRequest(name, 5.0, {"1": 4.0}) for name in "xyz"])
    assert len(order_batches([three], EVEN, 1, 0.0).pruned) == 1
    assert not order_batches([three], EVEN, 1, 0.0, in_vain=False).pruned
    assert len(order_batches([three], EVEN, 2, 0.0, in_vain=False).pruned) == 2


def test_units_compute_at_the_same_time_and_share_ports():
    one = Batch("A", "u1", 2.0, [BatchRequest("a", 5.0, {"1": 1.0})])
    two = Batch("B", "u2", 2.0, [BatchRequest("b", 6.0, {"1": 1.0})])
    assert order_batches([one, two], EVEN, 0, 10.0).finish_s == {"A": 13.0, "B": 14.0}


def test_a_port_without_bandwidth_is_an_error():
    with pytest.raises(ConfigError) as error:
        order_batches(batches(), {"1": 1.0}, 5, 0.0)
    assert error.value.field == "bandwidth"


def test_the_queue_of_a_computing_unit_is_pruned_by_the_same_rule():
    """The port is the unit, and its load seconds of prefill: the longest prompt makes room for two others."""
    loads = {"long": 8.0, "short": 1.0, "other": 1.0}
    waiting = [
        Batch(name, "gpu", 0.0, [BatchRequest(name, due, {"gpu": loads[name]})])
        for name, due in (("long", 9.0), ("short", 9.5), ("other", 9.6))
    ]
    found = order_batches(waiting, {"gpu": 1.0}, 5, 0.0)
    assert found.scavengers == {"long"}


def drawn(rng):
    """Some batches on two units that load three ports. A request in ten is exempt, and one may have room to give."""
    found = []
    for number in range(rng.randint(1, 9)):
        requests = []
        for place in range(rng.randint(1, 5)):
            load = {port: rng.uniform(0.0, 3.0) for port in rng.sample("abc", rng.randint(1, 3))}
            value = rng.choice((0.0, 0.5, 1.0, 1.0, 2.0))
            exempt = rng.random() < 0.1
            requests.append(BatchRequest(f"{number}.{place}", rng.uniform(1.0, 15.0), load, exempt, value))
        found.append(Batch(f"B{number}", rng.choice(("u", "v")), rng.uniform(0.0, 0.5), requests))
    if rng.random() < 0.5:
        sent = BatchRequest("sent", -1e9, {"a": rng.uniform(0.0, 2.0), "b": rng.uniform(-3.0, 0.0)}, exempt=True)
        found.append(Batch("", "u", 0.0, [sent]))
    return found


@pytest.mark.parametrize("named", [{}, {"in_vain": False}, {"within_batch": True}], ids=str)
def test_the_same_is_pruned_as_where_every_step_looks_at_everything(named):
    rng = random.Random(8)
    several = 0
    for _ in range(200):
        waiting, bandwidth = drawn(rng), {port: rng.choice((0.5, 1.0, 2.0)) for port in "abc"}
        budget = rng.randint(0, 12)
        found = order_batches(waiting, bandwidth, budget, 1.0, **named)
        slow = order_slowly(waiting, bandwidth, budget, 1.0, **named)
        assert found.order == slow.order
        assert [each[:4] for each in found.pruned] == [each[:4] for each in slow.pruned]
        assert [each.finish_s for each in found.pruned] == pytest.approx([each.finish_s for each in slow.pruned])
        assert [each.due_s for each in found.pruned] == [each.due_s for each in slow.pruned]
        assert found.finish_s == pytest.approx(slow.finish_s)
        several += len(found.pruned) > 1
    assert several > 50
