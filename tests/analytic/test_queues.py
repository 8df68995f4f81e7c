"""The simulator against closed forms. A step of DELTA serves every running sequence, so a sequence of n tokens takes
n x DELTA whatever runs beside it, and n geometric with a large mean is an exponential service time."""

import math
import statistics

import numpy as np
import pytest

from controller.core.types import LatencyCoefficients, Targets
from controller.dispatch import build_dispatcher
from controller.simulator import Demand, InstanceSettings, Simulation, SimulationSettings

DELTA = 0.004
MEAN_S = 0.5
SEEDS = range(3)  # a mean over time needs them, an identity that holds in each run does not
REQUESTS = 2000
PATIENT = Targets(1e6, 1e6, None, 1e6)
CLOCK = LatencyCoefficients(DELTA, 0.0, 0.0, DELTA, 0.0, 0.0)


def servers(slots):
    return InstanceSettings(
        CLOCK,
        kv_tokens=slots * 65_536,
        max_num_seqs=slots,
        max_num_batched_tokens=max(64, slots),
        max_model_len=65_536,
        block_size=1024,
        prefix_caching=False,
        scheduling_policy="fcfs",
    )


def poisson(seed, rate, service):
    rng = np.random.default_rng(seed)
    at = np.cumsum(rng.exponential(1 / rate, REQUESTS))
    mean = MEAN_S / DELTA
    tokens = rng.geometric(1 / mean, REQUESTS) if service == "exponential" else np.full(REQUESTS, round(mean))
    return [Demand(f"r{i}", float(at[i]), 1, int(tokens[i]), PATIENT) for i in range(REQUESTS)]


def run(demands, instances, policy="round_robin", overrides=None, sample_s=10.0):
    settings = SimulationSettings(instances, sample_s=sample_s, progress_s=30.0, telemetry_period_s=30.0)
    return Simulation(settings, build_dispatcher(policy, overrides), demands).run()


def mean_response(rate, instances, service="exponential", policy="round_robin", overrides=None):
    """Mean over seeds of the mean response, the first tenth of each run left out (it starts empty)."""
    means = []
    for seed in SEEDS:
        records = run(poisson(seed, rate, service), instances, policy, overrides).records
        warm = sorted(records, key=lambda record: record.at)[REQUESTS // 10 :]
        means.append(statistics.fmean(record.e2e_s for record in warm))
    return statistics.fmean(means)


def erlang_c_response(rate, c):
    """Mean response of M/M/c with mean service MEAN_S."""
    offered = rate * MEAN_S
    tail = offered**c / math.factorial(c) * c / (c - offered)
    wait_probability = tail / (sum(offered**k / math.factorial(k) for k in range(c)) + tail)
    return wait_probability * MEAN_S / (c - offered) + MEAN_S


@pytest.mark.sampled(1)
@pytest.mark.parametrize("load", [0.3, 0.6])
def test_one_server_with_exponential_service_is_m_m_1(load):
    measured = mean_response(load / MEAN_S, (servers(1),))
    assert measured == pytest.approx(MEAN_S / (1 - load), rel=0.08)


def test_one_server_with_constant_service_is_m_d_1():
    """Pollaczek-Khinchine: wait = load / (2 (1 - load)) x service."""
    load = 0.6
    measured = mean_response(load / MEAN_S, (servers(1),), "constant")
    assert measured == pytest.approx(MEAN_S * (1 + load / (2 * (1 - load))), rel=0.05)


def test_an_engine_of_three_slots_is_m_m_3():
    rate = 0.7 * 3 / MEAN_S
    assert mean_response(rate, (servers(3),)) == pytest.approx(erlang_c_response(rate, 3), rel=0.08)


def test_three_engines_behind_one_queue_are_m_m_3():
    """The dispatcher's own queue with one request at each engine: no engine idles while somebody waits."""
    rate = 0.7 * 3 / MEAN_S
    measured = mean_response(rate, (servers(1),) * 3, "exponential", "fcfs_window", {"pacing": {"window": 1}})
    assert measured == pytest.approx(erlang_c_response(rate, 3), rel=0.08)


@pytest.mark.thorough
def test_three_queues_are_worse_than_one():
    rate = 0.7 * 3 / MEAN_S
    assert mean_response(rate, (servers(1),) * 3) > 1.2 * erlang_c_response(rate, 3)


@pytest.mark.parametrize("seed", SEEDS[:2])
def test_littles_law(seed):
    """Mean number in the system = arrival rate x mean response, over the whole run from empty to empty."""
    result = run(poisson(seed, 0.8 * 2 / MEAN_S, "exponential"), (servers(1),) * 2, sample_s=0.25)
    in_system = statistics.fmean(s.queued + s.waiting + s.running for s in result.samples)
    total = sum(record.e2e_s for record in result.records)
    assert in_system == pytest.approx(total / result.ended_at, rel=0.02)


@pytest.mark.parametrize("seed", SEEDS[:2])
def test_work_is_conserved(seed):
    demands = poisson(seed, 0.9 * 2 / MEAN_S, "exponential")
    result = run(demands, (servers(2),))
    assert sorted(record.id for record in result.records) == sorted(demand.id for demand in demands)
    (use,) = result.instances
    assert use.generated_tokens == sum(demand.output_tokens for demand in demands)
    assert use.prompt_tokens == sum(demand.prompt_tokens for demand in demands)
    one_at_a_time = DELTA * use.generated_tokens
    assert one_at_a_time / 2 <= use.busy_s <= one_at_a_time  # one or two sequences in every busy step
    assert use.busy_s == pytest.approx(DELTA * use.steps)
