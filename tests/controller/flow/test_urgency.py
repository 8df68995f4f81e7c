"""Worked examples M1 to M3: link utilisation, levels, and the order of flows on a host and on the wire."""

import math

import pytest

from controller.core.errors import ConfigError
from controller.flow.flows import FlowStage, MsFlow
from controller.flow.policies import DeferAndPromote
from controller.flow.scheduler import (
    BatchQueued,
    FlowProgress,
    FlowScheduler,
    LayerNeeded,
    LayerStarted,
    NotTaken,
    OrderSent,
    Permit,
    PortSeen,
    Submitted,
)
from controller.flow.urgency import (
    crossing_at,
    level_of,
    minimal_link_utilisation,
    promotion_thresholds,
    relative_layer_index,
)

BANDWIDTH = 25e9


@pytest.mark.parametrize(("left_s", "expected"), [(0.5, 0.4), (0.25, 0.8), (0.1, 2.0), (0.0, math.inf)])
def test_m1_minimal_link_utilisation(left_s, expected):
    assert minimal_link_utilisation(2e9, left_s, BANDWIDTH, 0.6) == pytest.approx(expected)


def test_a_full_port_makes_nothing_infinitely_urgent():
    assert minimal_link_utilisation(2e9, 0.5, BANDWIDTH, 1.0) == minimal_link_utilisation(2e9, 0.5, BANDWIDTH, 0.95)


def test_as_printed_a_full_port_makes_everything_infinitely_urgent():
    assert minimal_link_utilisation(2e9, 0.5, BANDWIDTH, 1.2, most_load=1.0) == math.inf
    assert minimal_link_utilisation(0.0, 0.5, BANDWIDTH, 1.2, most_load=1.0) == 0.0
    assert crossing_at(3.0, 7.0, 1.0, 1.2, (0.5, 0.125), 2, most_load=1.0) == -math.inf
    assert crossing_at(3.0, 7.0, 1.0, 0.9, (0.5, 0.125), 3, most_load=0.5) == 7.0 - 3.0 / (0.125 * 0.5)


def test_m2_levels():
    thresholds = promotion_thresholds(4, 0.5, 4)
    assert thresholds == pytest.approx((0.125, 0.03125, 0.0078125))
    levels = [level_of(v, thresholds) for v in (0.4, 0.126, 0.125, 0.05, 0.03125, 0.01, 0.005, 0)]
    assert levels == [1, 1, 2, 2, 3, 3, 4, 4]
    assert promotion_thresholds(8, 0.5, 4)[-1] == pytest.approx(3.0518e-5, rel=1e-4)


def test_known_bounds_have_equal_ratios():
    ratio = (1 / 0.01) ** (1 / 4)
    assert ratio == pytest.approx(3.16228, rel=1e-5)
    assert promotion_thresholds(5, ratio, ratio)[:4] == pytest.approx((1, 1 / ratio, 1 / ratio**2, 1 / ratio**3))


def test_a_flow_that_does_not_move_crosses_when_its_utilisation_reaches_the_threshold():
    at = crossing_at(3.0, 7.0, 1.0, 0.0, (0.5, 0.125), 2)
    assert at == 1.0
    assert minimal_link_utilisation(3.0, 7.0 - at, 1.0, 0.0) == 0.5
    assert crossing_at(3.0, 7.0, 1.0, 0.0, (0.5, 0.125), 1) == math.inf


def test_a_layer_that_is_already_computed_is_as_urgent_as_the_current_one():
    assert [relative_layer_index(layer, 10) for layer in (9, 10, 14)] == [0, 0, 4]
    assert relative_layer_index(3, -20) == 23


def kv(name, utilisation, deadline_s=1.0, unit=""):
    """A KV transfer with this MLU on an idle port of rate 1."""
    size = utilisation * deadline_s
    return MsFlow(name, FlowStage.KV_TRANSFER, size, "out", "in", unit, "b", (name,), deadline=deadline_s)


def reuse(layer, batch="b", name=""):
    return MsFlow(name or f"reuse{layer}", FlowStage.REUSE, 1.0, "out", "in", "u", batch, ("r",), layer)


def scheduler(**config):
    made = FlowScheduler(DeferAndPromote(DeferAndPromote.Config(**config)))
    made.handle([PortSeen("out", 1.0), PortSeen("in", 1.0), LayerStarted("u", "b", 10)], 0.0)
    return made


def permits(actions):
    return {action.flow_id: action.turn for action in actions if isinstance(action, Permit)}


def test_m3_order_on_the_host_and_on_the_wire():
    made = scheduler(levels=4)
    flows = [
        kv("loose", 0.001), reuse(20), kv("middle", 0.05), reuse(14), kv("tight", 0.2), reuse(11),
        MsFlow("collective10", FlowStage.COLLECTIVE, 1.0, "out", "in", "u", "b", ("r",), 10),
    ]  # fmt: skip
    turns = permits(made.handle([Submitted(flow) for flow in flows], 0.0)[0])
    order = sorted(turns, key=lambda name: turns[name].rank)
    assert order == ["tight", "collective10", "reuse11", "reuse14", "reuse20", "middle", "loose"]
    assert [turns[name].wire_class for name in order] == [0, 1, 2, 3, 3, 1, 3]
    printed = permits(_again(flows, levels=4, wire="printed"))
    assert [printed[name].wire_class for name in order] == [0, 0, 1, 3, 3, 1, 3]


def _again(flows, **config):
    return scheduler(**config).handle([Submitted(flow) for flow in flows], 0.0)[0]


def test_equal_layer_indices_go_by_the_order_between_batches():
    made = scheduler()
    made.handle([Submitted(reuse(12, "x", "x")), Submitted(reuse(12, "y", "y"))], 0.0)
    turns = permits(made.handle([OrderSent(1, ("y", "x"), frozenset(), 1.0)], 0.1)[0])
    assert turns["y"].rank < turns["x"].rank
    stale = made.handle([OrderSent(1, ("x", "y"), frozenset(), 9.0)], 0.2)[0]
    assert stale == []
    expired = permits(made.handle([], 1.0)[0])
    assert expired["x"].rank == expired["y"].rank


def test_of_equal_layer_indices_the_least_reuse_can_go_first():
    made = scheduler(within="least")
    flows = [
        MsFlow("collective10", FlowStage.COLLECTIVE, 0.1, "out", "in", "u", "b", ("r",), 10),
        MsFlow("much", FlowStage.REUSE, 2.0, "out", "in", "v", "x", ("r",), 0),
        MsFlow("little", FlowStage.REUSE, 1.0, "out", "in", "w", "y", ("s",), 0),
        MsFlow("later", FlowStage.REUSE, 0.2, "out", "in", "w", "y", ("s",), 2),
    ]
    turns = permits(made.handle([Submitted(flow) for flow in flows], 0.0)[0])
    turns |= permits(made.handle([OrderSent(1, ("x", "y", "b"), frozenset(), 9.0)], 0.1)[0])
    assert sorted(turns, key=lambda name: turns[name].rank) == ["little", "much", "collective10", "later"]
    moved = permits(made.handle([FlowProgress("much", 0.5)], 0.2)[0])
    assert moved["much"].rank < turns["little"].rank  # what is left counts, not what there was


def test_a_flow_is_promoted_only():
    """M2: an MLU of 0.05, then 0.01 because the link emptied, stays at level 2."""
    made = scheduler(levels=4, bytes_of="flow")
    first = permits(made.handle([Submitted(kv("a", 0.05))], 0.0)[0])
    assert first["a"].rank[0] == 2
    later = permits(made.handle([FlowProgress("a", 0.001)], 0.01)[0])
    assert later == {}


def test_a_flow_of_a_batch_that_computes_is_promoted_at_layer_boundaries_alone():
    made = scheduler(levels=4)
    made.handle([Submitted(kv("a", 0.02, unit="u"))], 0.0)
    assert permits(made.handle([], 0.95)[0]) == {}  # 0.02 / 0.05 = 0.4 by now, in the middle of a layer
    assert permits(made.handle([LayerStarted("u", "b", 11)], 0.95)[0])["a"].rank[0] == 0


def test_a_copy_of_several_layers_is_as_urgent_as_the_layer_it_has_come_to():
    """It goes before another one while its layer is the nearer one, and after it when that has changed."""
    made = scheduler()
    other = MsFlow("other", FlowStage.REUSE, 1.0, "out", "in", "v", "c", ("q",), 1)
    turns = permits(made.handle([LayerStarted("v", "c", 0), Submitted(reuse(10)), Submitted(other)], 0.0)[0])
    assert turns["reuse10"].rank < turns["other"].rank
    turns |= permits(made.handle([LayerNeeded("reuse10", 12)], 0.0)[0])
    assert turns["other"].rank < turns["reuse10"].rank
    assert turns["reuse10"].wire_class == 3
    turns |= permits(made.handle([LayerStarted("u", "b", 12)], 0.0)[0])
    assert turns["reuse10"].rank < turns["other"].rank
    assert made.handle([LayerNeeded("reuse10", 12), LayerNeeded("gone", 3)], 0.0)[0] == [], "nothing changed"


def test_all_bytes_of_a_request_count_not_those_of_one_layer():
    one = MsFlow("a", FlowStage.KV_TRANSFER, 0.01, "out", "in", "u", "b", ("r",), deadline=1.0, later_bytes=0.19)
    assert permits(scheduler().handle([Submitted(one)], 0.0)[0])["a"].rank[0] == 0  # 0.2 > 0.125
    printed = permits(scheduler(bytes_of="flow").handle([Submitted(one)], 0.0)[0])
    assert printed["a"].rank[0] == 3  # 0.01


def test_a_flow_does_not_count_its_own_rate_as_load():
    """Its own 0.9 of the port: as printed it promotes itself."""
    seen = PortSeen("out", 1.0, {3.0: 0.9})
    mine = scheduler().handle([seen, Submitted(kv("a", 0.02))], 0.0)[0]
    assert permits(mine)["a"].rank[0] == 3
    printed = scheduler(load_of="all").handle([seen, Submitted(kv("a", 0.02))], 0.0)[0]
    assert permits(printed)["a"].rank[0] == 0


def test_the_load_before_a_flow_counts_up_to_a_bound():
    """Reuse fills the port: as printed even a flow that has all the time then goes before it."""
    seen = PortSeen("out", 1.0, {1.0: 1.0})
    calm = scheduler().handle([seen, Submitted(kv("a", 0.0005))], 0.0)[0]
    assert permits(calm)["a"].rank[0] == 3  # 0.0005 / 0.05 = 0.01
    assert permits(scheduler(most_load=0.5).handle([seen, Submitted(kv("a", 0.0005))], 0.0)[0])["a"].rank[0] == 5
    printed = scheduler(most_load=1.0)
    assert permits(printed.handle([seen, Submitted(kv("a", 0.0005))], 0.0)[0])["a"].rank[0] == 0


def test_more_load_promotes_only_up_to_the_bound():
    for most_load, rank in ((0.5, None), (1.0, 0)):
        made = scheduler(most_load=most_load)
        made.handle([PortSeen("out", 1.0, {1.0: 0.5}), Submitted(kv("a", 0.0005))], 0.0)
        turns = permits(made.handle([PortSeen("out", 1.0, {1.0: 1.0})], 0.1)[0])
        assert (turns["a"].rank[0] if turns else None) == rank


def test_a_transfer_that_cannot_be_in_time_goes_last():
    """Even alone it would be late: before everything else it would only make others late. It comes back if it can be
    in time after all."""
    flows = [Submitted(kv("late", 1.5)), Submitted(kv("loose", 0.00001)), Submitted(reuse(11))]
    made = scheduler()
    turns = permits(made.handle(flows, 0.0)[0])
    assert sorted(turns, key=lambda name: turns[name].rank) == ["reuse11", "loose", "late"]
    assert turns["late"].wire_class == 7
    assert (
        permits(made.handle([PortSeen("out", 2.0), PortSeen("in", 2.0), FlowProgress("late", 1.5)], 0.0)[0])[
            "late"
        ].rank[0]
        == 0
    )
    printed = permits(scheduler(late="first").handle(flows, 0.0)[0])
    assert min(printed, key=lambda name: printed[name].rank) == "late"


def test_a_transfer_that_may_have_been_sent_since_the_last_report_is_not_late_yet():
    made = scheduler()
    made.handle([Submitted(kv("a", 0.9))], 0.0)
    assert permits(made.handle([FlowProgress("a", 0.5)], 0.45)[0]) == {}
    assert permits(made.handle([LayerStarted("u", "b", 11)], 0.6)[0]) == {}  # 0.35 may be left of 0.5
    assert permits(made.handle([FlowProgress("a", 0.5)], 0.6)[0])["a"].rank[0] == 8


@pytest.mark.parametrize(("queued", "ahead"), [(True, 22), (False, 0)])
def test_a_batch_that_waits_for_its_unit_is_further_away(queued, ahead):
    """By the layers of the batch before it that are not computed yet; or by none, as one setting has it."""
    made = scheduler(queued=queued)
    made.handle([BatchQueued("w", "b", 32), BatchQueued("w", "c", 32), LayerStarted("w", "b", 10)], 0.0)
    flows = [
        MsFlow(name, FlowStage.REUSE, 1.0, "out", "in", "w", name, ("r",), layer)
        for name, layer in (("b", 12), ("c", 2))
    ]
    turns = permits(made.handle([Submitted(flow) for flow in flows], 0.0)[0])
    assert (turns["b"].rank[1], turns["c"].rank[1]) == (2, 2 + ahead)


def test_a_batch_that_is_queued_again_goes_behind_the_others():
    """So one that was set aside stays behind those that came after it."""
    made = scheduler()
    first, aside = BatchQueued("w", "b", 32), BatchQueued("w", "c", 32)
    made.handle([first, aside, BatchQueued("w", "d", 32), aside, LayerStarted("w", "b", 10)], 0.0)
    flows = [MsFlow(name, FlowStage.REUSE, 1.0, "out", "in", "w", name, ("r",), 2) for name in "cd"]
    turns = permits(made.handle([Submitted(flow) for flow in flows], 0.0)[0])
    assert (turns["d"].rank[1], turns["c"].rank[1]) == (24, 56)
    made.handle([first], 0.1)  # it does not run any more
    flow = MsFlow("d3", FlowStage.REUSE, 1.0, "out", "in", "w", "d", ("r",), 3)
    assert permits(made.handle([Submitted(flow)], 0.1)[0])["d3"].rank[1] == 3


def test_reuse_does_not_fall_back_when_another_batch_overtakes_its_own():
    made = scheduler()
    made.handle([BatchQueued("w", "c", 32), BatchQueued("w", "d", 32)], 0.0)
    flow = MsFlow("c2", FlowStage.REUSE, 1.0, "out", "in", "w", "c", ("r",), 2)
    assert permits(made.handle([Submitted(flow)], 0.0)[0])["c2"].rank[1] == 2
    assert permits(made.handle([LayerStarted("w", "d", 0)], 0.1)[0]) == {}  # 32 layers more before it


def test_weight_loads_come_after_requests_with_a_floor_and_before_scavengers():
    made = scheduler()
    weights = MsFlow("w", FlowStage.WEIGHTS, 9.0, "out", "in")
    turns = permits(made.handle([Submitted(weights), Submitted(kv("a", 0.001)), Submitted(reuse(30))], 0.0)[0])
    assert sorted(turns, key=lambda name: turns[name].rank) == ["reuse30", "a", "w"]
    assert turns["w"].floor == 0.05
    pruned = permits(made.handle([OrderSent(1, (), frozenset({"a"}), 9.0)], 0.0)[0])
    assert pruned["a"].rank > turns["w"].rank
    back = permits(made.handle([OrderSent(2, (), frozenset(), 9.0)], 0.1)[0])
    assert back["a"].rank < turns["w"].rank


def test_orders_that_only_prune_end_as_well_and_so_does_their_sequence():
    made = scheduler()
    made.handle([Submitted(kv("a", 0.001))], 0.0)
    actions, wake_at = made.handle([OrderSent(5, (), frozenset({"a"}), 1.0)], 0.1)
    assert permits(actions)["a"].rank == (math.inf,)
    assert wake_at <= 1.0
    assert permits(made.handle([], 1.0)[0])["a"].rank < (math.inf,)
    again = permits(made.handle([OrderSent(1, (), frozenset({"a"}), 2.0)], 1.1)[0])
    assert again["a"].rank == (math.inf,)


def test_what_cannot_be_in_time_any_more_says_so():
    turns = permits(scheduler().handle([Submitted(kv("a", 2.0))], 0.0)[0])
    assert turns["a"].infeasible


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"size_bytes": 0}, "size_bytes"),
        ({"size_bytes": -1.0}, "size_bytes"),
        ({"size_bytes": math.inf}, "size_bytes"),
        ({"stage": 9}, "stage"),
        ({"deadline": None}, "deadline"),
        ({"deadline": math.nan}, "deadline"),
        ({"layer": -1}, "layer"),
        ({"id": ""}, "id"),
        ({"egress": ""}, "egress"),
        ({"ingress": ""}, "ingress"),
        ({"later_bytes": -1}, "later_bytes"),
        ({"stage": FlowStage.REUSE}, "unit"),
    ],
)
def test_a_wrong_flow_names_its_field(changes, field):
    good = {
        "id": "a",
        "stage": FlowStage.KV_TRANSFER,
        "size_bytes": 1.0,
        "egress": "o",
        "ingress": "i",
        "deadline": 1.0,
    }
    with pytest.raises(ConfigError) as error:
        MsFlow(**{**good, **changes})
    assert error.value.field == field


def test_a_flow_that_is_not_taken_says_why_and_the_others_go_on():
    made = scheduler()
    actions, _ = made.handle([Submitted(kv("a", 0.1)), Submitted(kv("a", 0.1)), Submitted(reuse(11))], 0.0)
    assert set(permits(actions)) == {"a", "reuse11"}
    assert [(each.flow_id, each.field) for each in actions if isinstance(each, NotTaken)] == [("a", "id")]
    elsewhere = MsFlow("x", FlowStage.WEIGHTS, 1.0, "out", "nowhere")
    assert made.handle([Submitted(elsewhere)], 0.0)[0] == [NotTaken("x", "ingress", "port 'nowhere' is not known")]


@pytest.mark.parametrize(
    ("config", "field"),
    [
        ({"levels": 1}, "levels"),
        ({"scale": 0}, "scale"),
        ({"ratio": 1}, "ratio"),
        ({"level_one": 0.001}, "level_one"),
        ({"bytes_of": "layer"}, "bytes_of"),
        ({"load_of": "self"}, "load_of"),
        ({"most_load": 0}, "most_load"),
        ({"most_load": 1.01}, "most_load"),
        ({"wire": "raw"}, "wire"),
        ({"late": "never"}, "late"),
        ({"within": "unit"}, "within"),
        ({"weights_floor": 1.0}, "weights_floor"),
    ],
)
def test_a_wrong_setting_names_its_field(config, field):
    with pytest.raises(ConfigError) as error:
        DeferAndPromote.Config(**config)
    assert error.value.field == field
