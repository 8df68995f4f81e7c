"""Each setting of flows and pruning changes something: with another value the same events end otherwise."""

from dataclasses import fields, replace
from functools import cache

import pytest

from controller.core.pruning import PrefillUnit
from controller.flow.coordinator import Coordinator, CoordinatorConfig
from controller.flow.flows import FlowStage, MsFlow
from controller.flow.gate import GateConfig
from controller.flow.policies import FLOW_POLICIES, DeferAndPromote
from controller.flow.scheduler import (
    BatchQueued,
    FlowScheduler,
    FlowSchedulerConfig,
    LayerStarted,
    OrderSent,
    Permit,
    PortSeen,
    Submitted,
)
from controller.simulator.flows.cluster import ModelShape, PrefillShape
from controller.simulator.flows.experts import ExpertSettings
from controller.simulator.flows.prefill import PrefillRequest, PrefillRun, PrefillSettings
from tests.controller.flow.test_coordinator import NOW, report, waiting
from tests.controller.flow.test_gate import Host

POLICY = {
    "levels": 4,
    "scale": 0.25,
    "ratio": 2.0,
    "level_one": 1.0,
    "bytes_of": "flow",
    "load_of": "all",
    "most_load": 0.5,
    "late": "first",
    "within": "least",
    "queued": False,
    "wire": "printed",
    "weights_floor": 0.2,
}
GATE = {"lease_s": 3.0, "window_s": 0.5, "settle_s": 1.5, "retest_s": 0.5, "spare": 0.6, "slice_s": 0.4}
COORDINATOR = {"drop_budget": 0.2, "period_s": 0.5, "trust": 1.0, "batch_tokens": 10_000}
PREFILL = {
    "instances": 3,
    "target": 0.5,
    "order_s": 0.5,
    "orders_per_s": 0.5,
    "budget": 0.0,
    "ordered": False,
    "in_vain": False,
    "period_s": 0.5,
    "report_s": 0.5,
    "copies": False,
    "leaf_servers": 4,
    "by_class": True,
    "load_error": 1.0,
}
EXPERTS = {"skew": 2.0, "drift_s": 1.0, "error": 1.0, "by_layer": True, "history": False}


@pytest.mark.parametrize(
    ("config", "tried", "besides"),
    [
        (DeferAndPromote.Config, POLICY, ()),
        (GateConfig, GATE, ()),
        (CoordinatorConfig, COORDINATOR, ()),
        (PrefillSettings, PREFILL, ("shape", "experts", "seed")),  # the seed is that of `load_error` and `experts`
        (ExpertSettings, EXPERTS, ()),
    ],
)
def test_every_setting_is_tried_below(config, tried, besides):
    assert {field.name for field in fields(config)} == {*tried, *besides}


def turns(policy):
    """Of flows of each stage, on ports with load; one batch waits for another on its unit."""
    scheduler = FlowScheduler(policy)
    events = [PortSeen("out", 1.0, {1.0: 0.6, 5.0: 0.3}), PortSeen("in", 1.0)]
    events += [BatchQueued("u", "b", 8), LayerStarted("u", "b", 2), BatchQueued("u", "behind", 8)]
    events.append(OrderSent(1, ("b", "c", "behind"), frozenset(), 99.0))
    flows = [MsFlow("w", FlowStage.WEIGHTS, 9.0, "out", "in"), reuse("r1", 0.2, "b", 4), reuse("r2", 0.1, "behind", 3)]
    flows += [reuse("r3", 0.1, "c", 2, unit="v"), MsFlow("c", FlowStage.COLLECTIVE, 1.0, "out", "in", "v", "c", (), 2)]
    for place in range(12):
        due = 1.0 if place else 0.2  # the first one cannot be in time
        size = 0.25 * 0.4**place if place else 0.3
        about = ("u", "b", (f"q{place}",), 2, due)
        flows.append(MsFlow(f"k{place}", FlowStage.KV_TRANSFER, size, "out", "in", *about, later_bytes=2 * size))
    given = scheduler.handle([*events, *map(Submitted, flows)], 0.0)[0]
    return {permit.flow_id: permit.turn for permit in given if isinstance(permit, Permit)}


def reuse(name, size, batch, layer, unit="u"):
    return MsFlow(name, FlowStage.REUSE, size, "out", "in", unit, batch, (), layer)


@pytest.mark.parametrize("name", POLICY)
def test_a_setting_of_mfs_changes_turns(name):
    before, after = (turns(DeferAndPromote(DeferAndPromote.Config(**given))) for given in ({}, {name: POLICY[name]}))
    assert before.keys() == after.keys()
    assert before != after


def who_sends(**settings):
    """At each step: one sender that is slow for a while, one that would fill the port, weight loads, and one of which
    nothing is heard."""
    host, seen = Host(**settings), []
    host.add("slow", 700.0, 30.0, limit=60.0)
    host.add("next", 500.0, 60.0)
    host.silent.add("mute")
    host.add("mute", 1.0, 90.0)
    for name in ("w1", "w2"):
        host.add(name, 900.0, stage=FlowStage.WEIGHTS)
    for step in range(240):
        if step == 100:
            host.limits["slow"] = 100.0
        host.run(host.now + 0.05)
        seen.append((tuple(sorted(name for name, go in host.going.items() if go and name in host.left)), *host.expired))
    return seen


@pytest.mark.parametrize("name", GATE)
def test_a_setting_of_the_gate_changes_who_sends(name):
    assert who_sends() != who_sends(**{name: GATE[name]})


def test_a_period_decides_when_kv_transfers_are_promoted():
    promoted = []
    for period_s in (0.0, 0.25):
        scheduler = FlowScheduler(FLOW_POLICIES["mfs"](), FlowSchedulerConfig(period_s))
        flow = MsFlow("k", FlowStage.KV_TRANSFER, 0.1, "out", "in", deadline=1.0)
        wake_at = scheduler.handle([PortSeen("out", 1.0), PortSeen("in", 1.0), Submitted(flow)], 0.0)[1]
        promoted.append(wake_at)
    assert promoted[0] < promoted[1]


@pytest.mark.parametrize("name", COORDINATOR)
def test_a_setting_of_the_coordinator_changes_what_is_pruned_or_how(name):
    rows = [waiting(f"x{place}", 1.0 + 0.4 * place, 0.6) for place in range(8)]
    decodes = PrefillUnit("w0", 1.0, 0.0, token_rate=100.0, free_slots=8)  # else it is trusted whole
    reports = [report("a", *rows[::2], unit=decodes), report("b", *rows[1::2], at=NOW - 2.0, unit=decodes)]
    before = CoordinatorConfig(drop_budget=1.0, trust=0.65)
    found = [
        Coordinator(config).decide(reports, NOW) for config in (before, replace(before, **{name: COORDINATOR[name]}))
    ]
    assert found[0] != found[1]


SHAPE = PrefillShape(
    ModelShape("Llama 3 8B", 32, 4096, 32, 8, 128, 7e9, 0.0, 0), tensor_parallel=4, ranks=1, sequence_parallel=4,
    nic_bytes_per_s=3e7,
)  # fmt: skip


@cache
def first_tokens(settings):
    """Under more than the links carry."""
    requests = [
        PrefillRequest(f"q{place}", 0.15 * place, 1500 + 700 * (place % 4), 400 * (place % 4), f"x{place % 3}")
        for place in range(40)
    ]
    return PrefillRun(settings, DeferAndPromote).serve(requests)


@pytest.mark.parametrize("name", PREFILL)
def test_a_setting_of_simulated_prefills_changes_first_tokens(name):
    before = PrefillSettings(SHAPE, 4, budget=0.5)
    assert first_tokens(before) != first_tokens(replace(before, **{name: PREFILL[name]}))


MIXTURE = PrefillShape(
    ModelShape("Mixtral 8x22B", 56, 6144, 48, 8, 128, 5e9, 34e9, 2), tensor_parallel=4, ranks=8, nic_bytes_per_s=1e9,
    groups=4, batch_tokens=4096,
)  # fmt: skip


@pytest.mark.parametrize("name", EXPERTS)
def test_a_setting_of_experts_changes_first_tokens(name):
    """Twice ten at once: at the second time something has been learned."""
    requests = [PrefillRequest(f"q{n}", 3.0 * (n // 10), 500 + 700 * (n % 4), 0, f"x{n}") for n in range(20)]
    before = ExpertSettings(1.0, error=0.2)
    found = [
        PrefillRun(PrefillSettings(MIXTURE, 1, budget=0.5, experts=experts, seed=1), DeferAndPromote).serve(requests)
        for experts in (before, replace(before, **{name: EXPERTS[name]}))
    ]
    assert found[0] != found[1]
