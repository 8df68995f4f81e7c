"""Stages apart against closed forms: a decode instance of c slots behind a prefill stage that is all but free is M/M/c,
a shared link with exponential sizes is M/M/1 with processor sharing, and Little's law holds over all stages."""

import statistics
from dataclasses import replace

import numpy as np
import pytest

from controller.dispatch import build_dispatcher, build_migrator
from controller.simulator import Demand, LinkSettings, Simulation, SimulationSettings
from tests.analytic.test_queues import DELTA, MEAN_S, PATIENT, REQUESTS, SEEDS, erlang_c_response, poisson, servers

FREE = LinkSettings(bandwidth_gb_s=1e9, latency_s=0.0)
PREFILL = replace(servers(64), role="prefill", max_num_batched_tokens=65_536)


def run(demands, instances, links=FREE, migration="least_outstanding", sample_s=10.0):
    settings = SimulationSettings(instances, sample_s=sample_s, progress_s=30.0, telemetry_period_s=30.0, links=links)
    migrator = build_migrator("round_robin", {"migration": {"name": migration}})
    return Simulation(settings, build_dispatcher("round_robin"), demands, migrator=migrator).run()


def warm(records):
    return sorted(records, key=lambda record: record.at)[REQUESTS // 10 :]


@pytest.mark.simulated
@pytest.mark.parametrize("slots", [1, 3])
def test_a_decode_instance_of_c_slots_is_m_m_c(slots):
    """From the first token to the last; n tokens after the first take n steps."""
    rate = 0.6 * slots / MEAN_S
    decode = replace(servers(slots), role="decode")
    means = []
    for seed in SEEDS:
        records = warm(run(poisson(seed, rate, "exponential"), (PREFILL, decode)).records)
        means.append(statistics.fmean(record.e2e_s - record.ttft_s for record in records))
    assert statistics.fmean(means) == pytest.approx(erlang_c_response(rate, slots), rel=0.08)


@pytest.mark.thorough
def test_a_shared_link_is_m_m_1_with_processor_sharing():
    """Mean transfer = its time alone / (1 - load), whatever the sizes' law; alone is 0.5 s on average here."""
    load, mean_tokens = 0.6, 400
    links = LinkSettings(bandwidth_gb_s=1.0, latency_s=0.0)
    size = round(MEAN_S * 1e9 / mean_tokens)
    instances = tuple(
        replace(servers(256), role=role, max_num_batched_tokens=65_536, kv_bytes_per_token=size)
        for role in ("prefill", "decode")
    )
    means = []
    for seed in SEEDS:
        rng = np.random.default_rng(seed)
        at = np.cumsum(rng.exponential(MEAN_S / load, REQUESTS))
        prompts = rng.geometric(1 / mean_tokens, REQUESTS)
        demands = [Demand(f"r{i}", float(at[i]), int(prompts[i]), 2, PATIENT) for i in range(REQUESTS)]
        means.append(statistics.fmean(r.kv_transfer_s for r in warm(run(demands, instances, links).records)))
    assert statistics.fmean(means) == pytest.approx(MEAN_S / (1 - load), rel=0.1)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("seed", SEEDS[:2])
def test_littles_law_over_all_stages(seed):
    demands = poisson(seed, 0.7 * 2 / MEAN_S, "exponential")
    demands = [replace(each, prompt_tokens=200) for each in demands]
    links = LinkSettings(bandwidth_gb_s=0.2, latency_s=0.01)
    result = run(demands, (PREFILL, *(replace(servers(1), role="decode"),) * 2), links, sample_s=0.25)
    in_system = statistics.fmean(s.queued + s.waiting + s.running + s.moving for s in result.samples)
    total = sum(record.e2e_s for record in result.records)
    assert in_system == pytest.approx(total / result.ended_at, rel=0.02)
    assert statistics.fmean(s.moving for s in result.samples) > 0.05


@pytest.mark.sampled(1)
@pytest.mark.parametrize("migration", ["least_outstanding", "tpot_budget", "one_shot"])
def test_work_is_conserved_over_both_stages(migration):
    demands = poisson(1, 0.8 * 4 / MEAN_S, "exponential")
    decode = replace(servers(2), role="decode")
    result = run(demands, (PREFILL, decode, decode), migration=migration)
    assert sorted(record.id for record in result.records) == sorted(demand.id for demand in demands)
    first, *others = result.instances
    # Engines do not know beforehand that a first token is the last one: it is asked for again, as a whole answer.
    twice = sum(demand.output_tokens == 1 for demand in demands)
    assert first.generated_tokens == len(demands) + twice
    assert sum(use.generated_tokens for use in others) == sum(demand.output_tokens - 1 for demand in demands)
    assert first.prompt_tokens == len(demands) + twice
    assert sum(use.prompt_tokens for use in others) == 0
    for use in others:
        assert DELTA * use.generated_tokens / 2 <= use.busy_s * (1 + 1e-9)
        assert use.busy_s <= DELTA * use.generated_tokens * (1 + 1e-9)
