"""The migrator's time-outs in simulated fleets: what sticks is undone, and no block of any engine stays taken."""

from __future__ import annotations

from dataclasses import replace

import pytest

from controller.core.types import LatencyCoefficients, Outcome
from controller.dispatch import build_dispatcher, build_migrator
from controller.simulator import Demand, LinkSettings, Simulation, SimulationSettings
from tests.controller.simulator.runs import FAST, PATIENT, SMALL

PREFILL, DECODE = replace(SMALL, role="prefill"), replace(SMALL, role="decode")
STUCK = LatencyCoefficients(20.0, 0.0, 0.0, 0.006, 1e-7, 1e-4)  # seconds for a prompt that is believed to take 9 ms
SLOW = replace(PREFILL, latency=STUCK, believed=FAST)
FREE = LinkSettings(bandwidth_gb_s=1e9, latency_s=0.0)


def run(instances, links, network_s=0.0, count=1, **migrator):
    settings = SimulationSettings(tuple(instances), links=links, network_s=network_s)
    demands = [Demand(f"x{i}", 0.01 * i, 100, 10, PATIENT, max_tokens=10) for i in range(count)]
    chosen = build_migrator("slackline", {"migrator": migrator})
    simulation = Simulation(settings, build_dispatcher("slackline"), demands, migrator=chosen)
    records = simulation.run().records
    assert len(records) == count
    end = simulation.heap.now + 60.0  # a step that runs keeps its blocks until it has ended
    while simulation.heap and simulation.heap.next_at < end:
        simulation.driver.step()
    taken = [instance.load(simulation.heap.now).kv_usage for instance in simulation.cluster]
    assert simulation.kv.moving == 0
    return records, taken


@pytest.mark.parametrize("network_s", [0.0, 0.003])
@pytest.mark.parametrize("overlap", [False, True])
def test_a_prefill_that_sticks_is_computed_elsewhere(overlap, network_s):
    """With overlap its decode stage was placed when its only step began: it goes too."""
    links = replace(FREE, overlap=overlap)
    (record,), taken = run([SLOW, PREFILL, DECODE], links, network_s, prefilling_timeout_s=1.0)
    assert (record.outcome, record.attempts, record.prefill_instance) == (Outcome.OK, 2, "engine-1")
    assert 1.0 < record.ttft_s < 1.1
    assert taken == [0.0, 0.0, 0.0]


@pytest.mark.parametrize("overlap", [False, True])
def test_where_every_prefill_sticks_the_third_is_the_last(overlap):
    (record,), taken = run([SLOW, DECODE], replace(FREE, overlap=overlap), prefilling_timeout_s=1.0)
    assert (record.outcome, record.reason, record.attempts) == (Outcome.FAILED, "prefilling_timeout", 3)
    assert taken == [0.0, 0.0]


def test_a_source_that_answers_no_one_in_time_is_given_up_and_frees_what_it_keeps():
    """The way there and back takes longer than an engine that reserved may take to begin."""
    links = replace(FREE, latency_s=0.5)
    (record,), taken = run([PREFILL, DECODE, DECODE], links, reserved_timeout_s=0.2, max_failures=4)
    assert (record.outcome, record.reason) == (Outcome.FAILED, "reserved_timeout")
    assert taken == [0.0, 0.0, 0.0]
    (record,), _ = run([PREFILL, DECODE, DECODE], links, reserved_timeout_s=0.6, max_failures=4)
    assert record.outcome is Outcome.OK


def test_a_transfer_that_times_out_is_rolled_back_too():
    prefill, decode = (replace(each, kv_bytes_per_token=1_000_000) for each in (PREFILL, DECODE))
    links = LinkSettings(bandwidth_gb_s=0.2, latency_s=0.0)  # 0.5 s for 100 tokens
    (record,), taken = run([prefill, decode, decode], links, moving_timeout_s=0.3, max_failures=4)
    assert (record.outcome, record.reason) == (Outcome.FAILED, "moving_timeout")
    assert taken == [0.0, 0.0, 0.0]


def test_time_outs_that_no_one_reaches_change_nothing():
    plain, _ = run([PREFILL, PREFILL, DECODE, DECODE], FREE, count=60)
    patient, taken = run([PREFILL, PREFILL, DECODE, DECODE], FREE, count=60, prefilling_timeout_s=9.0)
    assert [(each.id, each.ttft_s, each.e2e_s) for each in plain] == [(e.id, e.ttft_s, e.e2e_s) for e in patient]
    assert taken == [0.0] * 4
