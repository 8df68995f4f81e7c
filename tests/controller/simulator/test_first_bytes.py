"""The client's first byte comes from the decode instance: until then waiting costs TTFT, and only then TPOT."""

from dataclasses import replace

import numpy as np
import pytest

from controller.core.types import LatencyCoefficients, Outcome, Targets
from controller.dispatch import build_dispatcher
from controller.scale import ScalingConfig
from controller.simulator import (
    Demand,
    ElasticSettings,
    InstanceSettings,
    LinkFailure,
    LinkSettings,
    Simulation,
    SimulationSettings,
)
from controller.simulator.network import PortSpeed
from tests.controller.simulator.runs import simulate

A100 = LatencyCoefficients(0.0066, 5.54e-5, 1.52e-9, 0.0115, 8.2e-8, 3.66e-5)  # Llama-3.1-8B
PREFILL = InstanceSettings(A100, max_num_seqs=64, role="prefill", max_model_len=16_384)
DECODE = replace(PREFILL, role="decode")
KV_BYTES = 131_072  # of a token


def demand(name, at, prompt, output, ttft, tpot=0.05):
    return Demand(name, at, prompt, output, Targets(ttft, tpot, None, 60.0), "c", max_tokens=output)


def by_id(result):
    return {record.id: record for record in result.records}


def attained(records):
    return sum(record.attained for record in records) / len(records)


def test_waiting_for_a_decode_instance_costs_ttft_and_not_tpot():
    """One slot: the second answer waits for 100 tokens of the first, and then has the slot to itself."""
    demands = [demand("first", 0.0, 200, 101, 10.0), demand("second", 0.1, 200, 5, 10.0)]
    second = by_id(simulate(demands, instances=(PREFILL, replace(DECODE, max_num_seqs=1))))["second"]
    assert second.ttft_s == pytest.approx(1.1, abs=0.1)
    assert second.tpot_s == pytest.approx(0.0116, abs=0.001)
    assert second.kv_transfer_s > 1.0


def test_a_short_answer_is_not_hopeless_long_before_its_ttft():
    """One slot that is never free: an answer of five tokens has to have its first byte within 10 s, and others that
    could wait for longer keep coming."""
    demands = [demand("first", 0.0, 200, 101, 10.0), demand("short", 0.1, 200, 5, 10.0)]
    demands += [demand(f"other{i}", 0.2 + 0.5 * i, 200, 61, 30.0) for i in range(30)]
    records = by_id(simulate(demands, instances=(PREFILL, replace(DECODE, max_num_seqs=1))))
    assert records["short"].attained
    assert records["short"].ttft_s < 2.0
    assert attained(records.values()) == 1.0


def test_the_first_byte_that_is_due_first_comes_first():
    """One slot: many patient answers wait, each short, and the one that is due soon is long."""
    demands = [demand("first", 0.0, 200, 101, 10.0)]
    demands += [demand(f"patient{i}", 0.1, 200, 40, 30.0) for i in range(10)]
    demands += [demand("soon", 0.2, 200, 100, 2.0)]
    records = by_id(simulate(demands, instances=(PREFILL, replace(DECODE, max_num_seqs=1))))
    assert attained(records.values()) == 1.0


def test_at_the_engine_the_answer_with_the_least_time_for_its_slot_comes_first():
    """Short answers at a loose pace (9 s to spare) among long ones at a tighter pace (50 s), all sent on before there
    is a slot: by TPOT the short ones came last there and missed it, although half of the slots would do for them."""
    demands = [demand(f"long{i}", 0.01 * i, 100, 100, 2.0, 0.5) for i in range(32)]
    demands += [demand(f"short{i}", 0.005 + 0.01 * i, 100, 10, 2.0, 1.0) for i in range(32)]
    records = simulate(demands, instances=(PREFILL, replace(DECODE, max_num_seqs=4))).records
    assert attained(records) == 1.0


def test_a_link_too_slow_for_the_ttft_is_left_alone():
    """4,000 tokens take 5 s to the first decode instance, which the first request finds out, and 50 ms to the other."""
    links = LinkSettings(bandwidth_gb_s=10.0, ports=(PortSpeed(1, 0.1),))
    instances = tuple(replace(each, kv_bytes_per_token=KV_BYTES) for each in (PREFILL, DECODE, DECODE))
    demands = [demand("first", 0.0, 4000, 500, 10.0)]
    demands += [demand(f"r{i}", 6.0 + 0.4 * i, 4000, 20, 1.0) for i in range(20)]
    records = simulate(demands, instances=instances, links=links).records
    assert {record.instance for record in records if record.id != "first"} == {"engine-2"}
    assert attained(records) == 1.0


def crowd(rate, seconds, ttft=2.0, prompt=3000):
    rng = np.random.default_rng(11)
    at = np.cumsum(rng.exponential(1 / rate, int(rate * seconds)))
    return [demand(f"r{i}", float(each), prompt, 10, ttft) for i, each in enumerate(at)]


@pytest.mark.parametrize("ports", [(), (PortSpeed(0, 40.0),)], ids=["learned", "links"])
def test_the_dispatcher_counts_what_follows_a_prefill(ports):
    """3,000 tokens take 0.19 s to compute and 0.8 s to move. With 1.2 times as many as one instance can prefill, some
    are late: those that could not be in time for their first byte, so that the others are."""
    links = LinkSettings(bandwidth_gb_s=50.0, latency_s=0.8, ports=ports)
    result = simulate(crowd(6.4, 30), instances=(PREFILL, DECODE), links=links)
    assert {record.outcome for record in result.records} == {Outcome.OK}
    assert attained(result.records) > 0.6


def test_the_wait_for_a_decode_instance_is_no_part_of_it():
    """Six slots serve 9 requests a second of 60 tokens each, and 12 come. What is due first is placed first, so how
    long others waited says little of the next request, and would make all of them hopeless."""
    demands = [demand(f"r{i}", i / 12, 300, 60, 5.0) for i in range(120)]
    settings = SimulationSettings((PREFILL, replace(DECODE, max_num_seqs=6)))
    simulation = Simulation(settings, build_dispatcher("slackline"), demands)
    assert max(record.kv_transfer_s for record in simulation.run().records) > 1.0
    instance = simulation.scheduler.dispatcher._fleet.instances["engine-0"]
    assert instance.first_byte_s(300) < 0.1


# ---- scaling -------------------------------------------------------------------------------------------------------


def scaled_out(one, down_s):
    """When the decode stage got another instance, if it did, for `one` request whose link is down from 0.9 s on. Ten
    others before it show how fast the stage is."""
    links = LinkSettings(failures=(LinkFailure(1, 0.9, down_s),))
    demands = [*(demand(f"before{i}", 0.05 * i, 200, 5, 10.0) for i in range(10)), one]
    prefill, decode = (
        ScalingConfig("model", role=role, min_instances=1, max_instances=2, sustain_s=60.0)
        for role in ("prefill", "decode")
    )
    elastic = ElasticSettings(prefill, decode=decode)
    result = simulate(demands, instances=(PREFILL, DECODE), links=links, elastic=elastic)
    return [d.at for d in result.decisions if d.kind == "scale_out" and d.subject == "model/decode"]


def test_50_ms_of_waiting_do_not_scale_out():
    """The scaler looks at 1 s, while a request waits for a link that is down from 0.9 s to 1.1 s."""
    assert scaled_out(demand("r", 0.93, 200, 5, 10.0), 0.2) == []


def test_stages_that_became_late_still_count():
    """It was to have its first byte at 1.6 s, and the scaler looks at 2 s."""
    assert scaled_out(demand("r", 1.05, 200, 5, 0.55), 1.7)[:1] == [2.0]


def test_a_prefill_that_ended_late_does_not_scale_decode_out():
    """Its first byte was due before the prefill had ended."""
    assert scaled_out(demand("r", 0.7, 4000, 5, 0.24), 0.2) == []
