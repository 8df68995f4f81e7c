"""Worked examples M6 and M7: flows on one link under each policy, in time and in completion."""

import pytest

from controller.flow.flows import FlowStage, MsFlow
from controller.flow.policies import FLOW_POLICIES, DeferAndPromote
from controller.flow.scheduler import FlowSchedulerConfig
from controller.simulator.flows.run import PlannedFlow, run_flows

LINK = {"out": 1.0, "in": 100.0}
LATEST = {"A": 9.0, "B": 6.0, "C": 7.0}
REQUESTS = {"A": 1, "B": 2, "C": 1}


def table_1():
    """A: reuse that a later layer needs; B: a collective of two requests; C: a KV transfer with its deadline."""
    return [
        PlannedFlow(0.0, MsFlow("A", FlowStage.REUSE, 2.0, "out", "in", "u", "a", ("1",), 1)),
        PlannedFlow(0.0, MsFlow("B", FlowStage.COLLECTIVE, 4.0, "out", "in", "v", "b", ("2", "3"), 0)),
        PlannedFlow(0.0, MsFlow("C", FlowStage.KV_TRANSFER, 3.0, "out", "in", "w", "c", ("4",), deadline=7.0)),
    ]


def promoted_at(utilisation):
    return mfs(level_one=utilisation, load_of="before")


def mfs(**settings):
    config = DeferAndPromote.Config(**settings)
    return lambda: DeferAndPromote(config)


@pytest.mark.parametrize(
    ("policy", "ends", "in_time"),
    [
        (FLOW_POLICIES["fair_sharing"], (6, 9, 8), 1),
        (FLOW_POLICIES["shortest_first"], (2, 9, 5), 2),
        (FLOW_POLICIES["earliest_deadline"], (7, 9, 3), 2),
        (FLOW_POLICIES["karuna"], (3.5, 9, 7), 2),
        (promoted_at(1.0), (9, 4, 7), 4),
        (mfs(level_one=1.0, load_of="before", within="least"), (9, 4, 7), 4),
        (promoted_at(0.5), (9, 7, 4), 2),
        (promoted_at(0.125), (9, 7, 3), 2),
    ],
)
def test_m6_table_1(policy, ends, in_time):
    found = run_flows(table_1(), LINK, policy, FlowSchedulerConfig(period_s=0.0))
    assert tuple(found[name] for name in "ABC") == pytest.approx(ends)
    assert sum(REQUESTS[name] for name in "ABC" if found[name] <= LATEST[name] + 1e-6) == in_time


def test_promotions_wait_for_the_next_period():
    found = run_flows(table_1(), LINK, promoted_at(0.5), FlowSchedulerConfig(period_s=0.4))
    assert found["C"] == pytest.approx(4.2)  # 1.0 is no multiple of 0.4: promoted at 1.2


@pytest.mark.parametrize(
    ("policy", "layer_2"),
    [("fair_sharing", 3), ("shortest_first", 3), ("earliest_deadline", 3), ("mfs", 2), (mfs(within="least"), 2)],
)
def test_m7_figure_6_ingress(policy, layer_2):
    """Layer 2 starts when the collective of layer 1 has ended."""
    plan = [
        PlannedFlow(0.0, MsFlow("collective", FlowStage.COLLECTIVE, 2.0, "out", "in", "u", "b", ("r",), 1)),
        PlannedFlow(0.0, MsFlow("reuse", FlowStage.REUSE, 1.0, "out", "in", "v", "c", ("s",), 3)),
    ]
    assert run_flows(plan, LINK, FLOW_POLICIES[policy] if isinstance(policy, str) else policy)[
        "collective"
    ] == pytest.approx(layer_2)


@pytest.mark.parametrize(
    ("policy", "layer_2"),
    [("fair_sharing", 4), ("shortest_first", 4), ("earliest_deadline", 4), ("mfs", 3), (mfs(within="least"), 3)],
)
def test_m7_figure_7_egress(policy, layer_2):
    plan = [
        PlannedFlow(0.0, MsFlow("collective", FlowStage.COLLECTIVE, 3.0, "out", "in", "u", "b", ("r",), 2)),
        PlannedFlow(0.0, MsFlow("p2d", FlowStage.KV_TRANSFER, 1.0, "out", "in", "w", "c", ("s",), deadline=40.0)),
    ]
    assert run_flows(plan, LINK, FLOW_POLICIES[policy] if isinstance(policy, str) else policy)[
        "collective"
    ] == pytest.approx(layer_2)


@pytest.mark.parametrize("policy", list(FLOW_POLICIES))
def test_every_policy_sends_every_byte_and_leaves_no_link_idle(policy):
    if policy == "karuna":
        pytest.skip("Karuna gives an explicit deadline no more than its minimum rate")
    found = run_flows(table_1(), LINK, FLOW_POLICIES[policy])
    assert max(found.values()) == pytest.approx(9.0)


def test_weights_keep_their_floor_under_a_flow_that_goes_first():
    plan = [
        PlannedFlow(0.0, MsFlow("w", FlowStage.WEIGHTS, 1.0, "out", "in")),
        PlannedFlow(0.0, MsFlow("c", FlowStage.COLLECTIVE, 95.0, "out", "in", "u", "b", ("r",), 1)),
    ]
    found = run_flows(plan, LINK, FLOW_POLICIES["mfs"])
    assert found["w"] == pytest.approx(20.0)  # 5 % of the link
    assert found["c"] == pytest.approx(96.0)
