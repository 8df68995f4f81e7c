"""What every flow policy keeps: all flows end, no port sends more than it can, equal input gives equal results."""

import random

import pytest

from controller.flow.flows import FlowStage, MsFlow
from controller.flow.policies import FLOW_POLICIES
from controller.simulator.flows.run import FlowRun, PlannedFlow, run_flows

HOSTS = 4
PORTS = {f"{side}{host}": 10.0 for host in range(HOSTS) for side in ("out", "in")}


def plan(seed, count=40):
    rng = random.Random(seed)
    flows = []
    for number in range(count):
        source, target = rng.sample(range(HOSTS), 2)
        stage, at = rng.choice(list(FlowStage)), rng.uniform(0.0, 5.0)
        deadline = at + rng.uniform(-0.5, 4.0) if stage is FlowStage.KV_TRANSFER else None
        flow = MsFlow(
            f"f{number}", stage, rng.uniform(0.1, 9.0), f"out{source}", f"in{target}", f"u{source}", f"b{source}",
            (f"r{number % 7}",), rng.randrange(8), deadline, rng.choice([0.0, 3.0]),
        )  # fmt: skip
        flows.append(PlannedFlow(at, flow))
    return flows


@pytest.mark.parametrize("name", list(FLOW_POLICIES))
@pytest.mark.parametrize("seed", range(3))
def test_every_flow_ends_and_no_earlier_than_its_ports_allow(name, seed):
    flows = plan(seed)
    ends = run_flows(flows, PORTS, FLOW_POLICIES[name])
    assert ends.keys() == {planned.flow.id for planned in flows}
    for at, flow, _ in flows:
        assert ends[flow.id] >= at + flow.size_bytes / 10.0 - 1e-9
    for port in PORTS:
        sizes = [flow.size_bytes for _, flow, _ in flows if port in (flow.egress, flow.ingress)]
        assert max(ends.values()) >= sum(sizes) / 10.0 - 1e-9
    assert run_flows(flows, PORTS, FLOW_POLICIES[name]) == ends


@pytest.mark.parametrize("name", list(FLOW_POLICIES))
def test_no_port_sends_more_than_it_can(name):
    run = FlowRun(PORTS, FLOW_POLICIES[name])
    for _, flow, _ in plan(9):
        run.submit(flow)
    while len(run.network):
        at = run.next_event()
        rates = run.network.rates(flow.id for _, flow, _ in plan(9) if flow.id in run.network)
        for port, of_port in rates.items():
            assert sum(of_port.values()) <= PORTS[port] * (1 + 1e-9)
        run.advance(at)
    assert run.network.moved_bytes == pytest.approx(sum(flow.size_bytes for _, flow, _ in plan(9)))


@pytest.mark.parametrize("name", sorted(set(FLOW_POLICIES) - {"karuna"}))
def test_no_link_is_idle_while_a_flow_waits_for_it(name):
    """Karuna alone gives an explicit deadline no more than its least rate."""
    run = FlowRun({"out0": 10.0, "in1": 10.0}, FLOW_POLICIES[name])
    flows = [MsFlow(f"k{i}", FlowStage.KV_TRANSFER, 5.0, "out0", "in1", deadline=50.0 + i) for i in range(4)]
    for flow in flows:
        run.submit(flow)
    while len(run.network):
        at = run.next_event()
        rates = run.network.rates(flow.id for flow in flows if flow.id in run.network)
        assert sum(rates["out0"].values()) == pytest.approx(10.0)
        run.advance(at)
    assert run.now == pytest.approx(2.0)


@pytest.mark.parametrize("name", list(FLOW_POLICIES))
def test_a_policy_says_what_it_is_and_its_settings_are_frozen(name):
    policy = FLOW_POLICIES[name]()
    assert policy.name == name
    assert FLOW_POLICIES[name].__doc__
    assert type(policy.config).__dataclass_params__.frozen
