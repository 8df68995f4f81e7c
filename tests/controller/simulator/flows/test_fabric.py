"""A fat tree with hashed paths: where flows go, and what it costs that two of them meet on one link."""

from collections import Counter
from dataclasses import replace

import pytest

from controller.core.errors import ConfigError
from controller.flow.flows import FlowStage, MsFlow
from controller.flow.policies import FLOW_POLICIES, FairSharing
from controller.simulator.flows.fabric import FatTree
from controller.simulator.flows.prefill import PrefillRun, PrefillSettings
from controller.simulator.flows.run import PlannedFlow, run_flows
from tests.controller.simulator.flows.test_prefill import EXPERTS, SLOW, requests

HOSTS = [f"h{number}" for number in range(16)]


def kv(number, source, target, size=100.0, layer=0):
    return MsFlow(
        f"f{number}.{layer}", FlowStage.KV_TRANSFER, size, f"{source}.out", f"{target}.in", requests=(f"q{number}",),
        layer=layer, deadline=1e6,
    )  # fmt: skip


def test_flows_within_a_leaf_take_no_link_between_switches():
    tree = FatTree(HOSTS, 4, 10.0)
    assert len(tree.links) == 4 * 4 * 2
    assert set(tree.links.values()) == {10.0}
    assert tree.path(kv(1, "h0", "h3")) == ("h0.out", "h3.in")
    first, up, down, last = tree.path(kv(1, "h0", "h4"))
    assert (first, last) == ("h0.out", "h4.in")
    assert (up[:6], up[-3:], down[:6], down[-5:]) == ("leaf0.", ".up", "leaf1.", ".down")
    assert up.split(".")[1] == down.split(".")[1], "one spine"
    assert {up, down} <= set(tree.links)


def test_a_request_keeps_its_path_and_requests_spread_over_all():
    tree = FatTree(HOSTS, 4, 10.0)
    assert tree.path(kv(7, "h0", "h4", layer=0)) == tree.path(kv(7, "h0", "h4", layer=5))
    used = Counter(tree.path(kv(number, "h0", "h4"))[1] for number in range(4000))
    assert len(used) == 4
    assert all(900 < count < 1100 for count in used.values())


def test_two_flows_that_meet_share_a_link_that_is_full():
    """Between different hosts; on two spines neither would wait."""
    tree = FatTree(HOSTS, 4, 10.0)
    ports = {f"{host}.{side}": 10.0 for host in HOSTS for side in ("out", "in")} | dict(tree.links)
    pairs = [(kv(1, "h0", "h4"), kv(number, "h1", "h5")) for number in range(2, 60)]
    meet = next(pair for pair in pairs if tree.path(pair[0])[1] == tree.path(pair[1])[1])
    apart = next(pair for pair in pairs if tree.path(pair[0])[1] != tree.path(pair[1])[1])
    for pair, expected_s in ((meet, 20.0), (apart, 10.0)):
        ends = run_flows([PlannedFlow(0.0, flow, tree.path(flow)) for flow in pair], ports, FairSharing)
        assert [ends[flow.id] for flow in pair] == [pytest.approx(expected_s)] * 2


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_prefills_over_hashed_paths_are_later_and_all_served(seed):
    """Under fair sharing: another moment of a transfer changes what MFS promotes, for the better as often."""
    load = requests(40, 60.0, seed)
    mean = {}
    for servers in (0, 4):
        run = PrefillRun(PrefillSettings(SLOW, 4, copies=False, leaf_servers=servers), FairSharing)
        served = run.serve(load)
        assert len(served) == 40
        mean[servers] = sum(each.ttft_s for each in served.values()) / 40
    assert mean[4] > mean[0]


def test_a_leaf_of_all_servers_changes_nothing():
    load = requests(20, 60.0)
    even, one = (
        PrefillRun(PrefillSettings(SLOW, 2, leaf_servers=servers), FLOW_POLICIES["fair_sharing"]).serve(load)
        for servers in (0, 1000)
    )
    assert even == one


@pytest.mark.parametrize(
    "wrong", [lambda: FatTree(HOSTS, 0, 1.0), lambda: FatTree(HOSTS, 1, 0.0),
              lambda: PrefillSettings(replace(EXPERTS), 2, leaf_servers=-1)],
)  # fmt: skip
def test_wrong_settings_are_refused(wrong):
    with pytest.raises(ConfigError):
        wrong()
