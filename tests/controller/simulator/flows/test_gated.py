"""Flows over a network whose senders are stopped and started by the transfer daemon's own gate."""

import pytest

from controller.flow import gate
from controller.flow.flows import FlowStage, MsFlow
from controller.flow.policies import FLOW_POLICIES, FairSharing
from controller.flow.scheduler import BatchComputed, BatchQueued, LayerStarted
from controller.simulator.flows import gated
from controller.simulator.flows.gated import GatedRun
from controller.simulator.flows.run import PlannedFlow, run_flows
from workers.flowd import daemon

PORTS = {"out": 10.0, "slow": 2.0, "fast": 10.0}


def fetch(name, size, to, batch="b"):
    return MsFlow(name, FlowStage.REUSE, size, "out", to, "u", batch, (name,))


def run_of(policy="shortest_first"):
    return GatedRun(PORTS, FLOW_POLICIES[policy], bandwidth=10.0)


def ends_of(run, flows):
    for flow in flows:
        run.submit(flow)
    return until_ended(run, len(flows))


def until_ended(run, count, limit_s=60.0):
    while len(run.ends) < count:
        at = run.next_event()
        assert at < limit_s
        run.advance(at)
    return run.ends


def test_the_simulator_decides_with_the_daemons_class():
    assert gated.Gate is daemon.Gate is gate.Gate


def test_of_two_flows_that_fill_a_port_one_goes_at_a_time():
    found = ends_of(run_of(), [fetch("long", 20.0, "fast"), fetch("short", 10.0, "fast")])
    assert found == {"short": pytest.approx(1.0), "long": pytest.approx(3.0)}


def test_what_the_first_flow_leaves_is_used_only_once_that_was_measured():
    """A network that shares to the byte lets the second one fill the port at once."""
    flows = [fetch("first", 7.0, "slow"), fetch("second", 8.0, "fast")]
    assert run_flows([PlannedFlow(0.0, each) for each in flows], PORTS, FLOW_POLICIES["shortest_first"])[
        "second"
    ] == pytest.approx(1.0)
    found = ends_of(run_of(), flows)
    assert found["first"] == pytest.approx(3.5)
    settle_s, window_s = gate.GateConfig().settle_s, gate.GateConfig().window_s
    assert 1.0 + settle_s <= found["second"] <= 1.0 + settle_s + 2 * window_s


def test_flows_of_equal_rank_share_the_port():
    found = ends_of(run_of("fair_sharing"), [fetch("a", 10.0, "fast"), fetch("b", 10.0, "fast")])
    assert found == {"a": pytest.approx(2.0), "b": pytest.approx(2.0)}


def test_a_receiver_serves_what_comes_from_two_senders_by_the_class_of_packets():
    """Each sender's gate knows its own flows alone, so both go."""
    run = GatedRun({"one": 10.0, "two": 10.0, "in": 10.0}, FairSharing, bandwidth=10.0)
    for sender in ("one", "two"):
        run.submit(MsFlow(sender, FlowStage.REUSE, 10.0, sender, "in", "u", "b"))
    assert until_ended(run, 2) == {"one": pytest.approx(2.0), "two": pytest.approx(2.0)}


def test_a_transfer_that_is_late_already_is_scheduled_nevertheless():
    run = run_of("earliest_deadline")
    run.advance(0.0)
    ends_of(run, [fetch("before", 10.0, "fast")])
    run.submit(MsFlow("late", FlowStage.KV_TRANSFER, 10.0, "out", "fast", deadline=0.5))
    assert until_ended(run, 2)["late"] == pytest.approx(2.0)
    assert not run.unscheduled


def test_a_flow_that_is_held_for_longer_than_its_lease_stays_scheduled():
    found = ends_of(run := run_of(), [fetch("short", 80.0, "fast"), fetch("long", 90.0, "fast")])
    assert found == {"short": pytest.approx(8.0), "long": pytest.approx(17.0)}
    assert not run.unscheduled


def test_a_gate_hears_of_layers_and_not_of_what_a_daemon_is_not_told():
    run = run_of("mfs")
    run.tell("out", [BatchQueued("u", "b", 4), LayerStarted("u", "b", 0)])
    run.submit(fetch("needed", 10.0, "fast"))
    run.tell("out", [BatchComputed("u", "b")])
    assert until_ended(run, 1)["needed"] == pytest.approx(1.0)
    assert run.hosts() == ["out"]
