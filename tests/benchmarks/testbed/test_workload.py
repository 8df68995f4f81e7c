"""The testbed's load, and that its exchanges carry the bytes that the simulator's do."""

from dataclasses import replace

import pytest

from benchmarks.testbed.figures import simulated
from benchmarks.testbed.serve import PairwiseRun, host_names
from benchmarks.testbed.workload import MIXES, PAYLOAD, PrefillLoad
from controller.flow.flows import FlowStage
from controller.flow.gate import Gate
from controller.flow.policies import FairSharing
from controller.simulator.flows import gated
from controller.simulator.flows.prefill import PrefillRequest, alone_s

LOAD = PrefillLoad(ranks=2, warm_up=2, counted=10)


class Recording:
    """The run's network, and the flows that were submitted to it."""

    def __init__(self, network):
        self._network = network
        self.flows = []

    def __getattr__(self, name):
        return getattr(self._network, name)

    def submit(self, flow, path=None):
        self.flows.append(flow)
        self._network.submit(flow, path)


def sent(run, requests):
    """Flows of a run, as they were submitted."""
    run.network = Recording(run.network)
    run.serve(requests)
    return run.network.flows


def test_all_policies_get_the_same_requests_and_seeds_differ():
    assert LOAD.requests(1) == LOAD.requests(1)
    assert LOAD.requests(1) != LOAD.requests(2)
    assert len(LOAD.requests(1)) == 12


def test_computing_takes_the_share_of_an_exchange_that_it_says():
    for compute in (0.25, 1.0):
        load = PrefillLoad(compute=compute)
        new = load.mean * (1 - load.mix.reuse)
        shape = load.shape
        computing = shape.dense_s(new, load.mean) + shape.experts_s(new * load.ranks)
        exchanging = shape.collective_bytes(new, new) / shape.port_bytes_per_s
        assert computing == pytest.approx(compute * exchanging)


def test_half_the_links_take_twice_as_long_for_the_same_request():
    request = PrefillRequest("q", 0.0, 1000, 500, "x")
    slow, fast = (alone_s(PrefillLoad(mbit=mbit).shape, request) for mbit in (100.0, 200.0))
    assert slow == pytest.approx(2 * fast)
    assert PrefillLoad(mbit=100.0).shape.nic_bytes_per_s == pytest.approx(12.5e6 * PAYLOAD)


def test_more_load_comes_sooner():
    late, soon = (replace(LOAD, load=load).requests(1)[-1].at for load in (0.2, 0.4))
    assert late == pytest.approx(2 * soon)


@pytest.mark.parametrize("ranks", [2, 4])
def test_the_ranks_send_each_other_what_the_simulator_says_a_rank_sends(ranks):
    load = replace(LOAD, ranks=ranks)
    request = PrefillRequest("q", 0.0, 800, 0, "x")
    flows = [
        flow for flow in sent(PairwiseRun(load.settings, FairSharing), [request]) if flow.stage is FlowStage.COLLECTIVE
    ]
    assert {(flow.egress, flow.ingress) for flow in flows if flow.layer == 0} == {
        (f"p0.{source}.out", f"p0.{target}.in")
        for source in range(ranks)
        for target in range(ranks)
        if source != target and 0 in (source, target)
    }, "ranks without tokens have nothing for each other"
    everything = sum(flow.size_bytes for flow in flows)
    expected = sum(load.shape.collective_bytes(800.0 * (rank == 0), 800.0 / ranks) for rank in range(ranks))
    assert everything == pytest.approx(load.groups * expected, rel=1e-6)


def test_the_hosts_are_those_that_flows_name():
    names = set(host_names(LOAD.settings))
    for flow in sent(PairwiseRun(LOAD.settings, FairSharing), LOAD.requests(1)):
        assert {flow.egress.rsplit(".", 1)[0], flow.ingress.rsplit(".", 1)[0]} <= names


def test_the_simulated_load_contends_and_mfs_shortens_its_exchanges():
    load = PrefillLoad(mix=MIXES["agent"], warm_up=4, counted=16)
    off, mfs = (simulated(load, policy, 1) for policy in ("off", "mfs"))
    assert 0.0 < off.attainment < 1.0
    assert mfs.cct_ms < 0.8 * off.cct_ms


@pytest.mark.parametrize(("policy", "gates"), [("off", 0), ("mfs", 4)])
def test_the_simulated_hosts_decide_as_their_daemons_do(monkeypatch, policy, gates):
    """One gate for each host that sends, with the bandwidth that its daemon is started with."""
    made = []

    class CountedGate(Gate):
        def __init__(self, scheduler, bandwidth, config=None):
            made.append(bandwidth)
            super().__init__(scheduler, bandwidth, config)

    monkeypatch.setattr(gated, "Gate", CountedGate)
    simulated(LOAD, policy, 1)
    assert made == [LOAD.mbit * 1e6 / 8] * gates
