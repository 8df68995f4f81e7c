"""What served requests tell about their engine, against a simulated engine whose latency is known."""

import random

import pytest

from controller.core.errors import ConfigError
from controller.core.types import LatencyCoefficients, Targets
from controller.dispatch import build_dispatcher
from controller.predict.latency import LatencyModel
from controller.predict.latency_records import Served, fit_records, intervals
from controller.simulator.settings import InstanceSettings, SimulationSettings
from controller.simulator.simulation import Simulation
from controller.simulator.workloads.demand import Demand

TRUTH = LatencyCoefficients(0.02, 1e-4, 0.0, 0.02, 2e-7, 3e-4)


def served(count=150, rate=4.0, truth=TRUTH, seed=1):
    rng = random.Random(seed)
    at, demands = 0.0, []
    for serial in range(count):
        at += rng.expovariate(rate)
        lengths = rng.randint(50, 2000), rng.randint(20, 300)
        demands.append(Demand(f"r{serial:03}", at, *lengths, Targets(10, 1, None, 1e9)))
    settings = SimulationSettings((InstanceSettings(truth, batching="vllm_v1", prefix_caching=False),))
    records = Simulation(settings, build_dispatcher("round_robin"), demands).run().records
    return [
        Served(r.prompt_tokens, r.output_tokens, r.at + r.ttft_s, r.at + r.ttft_s + r.tpot_s * (r.output_tokens - 1))
        for r in records
    ]


def test_one_interval_by_hand():
    """Two decode side by side for half of the first one's time; the second's prompt ends within it."""
    first, second = Served(100, 11, 0.0, 1.0), Served(300, 6, 0.5, 1.5)
    ((steps, context, batch, tokens, squares), elapsed), *_ = intervals([first], [first, second])
    assert (steps, tokens, squares, elapsed) == (10.0, 300.0, 90_000.0, 1.0)
    assert batch == pytest.approx(10 * 1.5)
    # the first grows from 100 to 111 around 105.5; the second is at 1.5 tokens on average while they overlap
    assert context == pytest.approx(10 * (105.5 + 0.5 * 301.5))


@pytest.mark.parametrize(("tokens", "batch"), [(0, 5), (0, 30), (500, 10), (2000, 40)])
def test_a_known_engine_is_found_again(tokens, batch):
    """Single coefficients are not: batch and context grow together. The step times they give are."""
    everyone = served()
    found, truth = LatencyModel(fit_records(intervals(everyone, everyone))), LatencyModel(TRUTH)
    shape = (tokens, tokens * tokens, batch, batch * 1000)
    assert found.step(*shape) == pytest.approx(truth.step(*shape), rel=0.08)
    assert found.coefficients.prefill_a == found.coefficients.decode_a


def test_a_part_of_the_requests_is_enough():
    everyone = served()
    found = fit_records(intervals(everyone[:50], everyone))
    assert found.decode_a == pytest.approx(TRUTH.decode_a, rel=0.1)
    assert found.prefill_b == pytest.approx(TRUTH.prefill_b, rel=0.1)


def test_requests_that_stood_still_are_left_out():
    everyone = served()
    stopped = [s._replace(last_at=s.last_at + 5.0) if i % 10 == 0 else s for i, s in enumerate(everyone)]
    rows = intervals(stopped, everyone)
    robust, naive = fit_records(rows), fit_records(rows, outlier=10.0)
    assert abs(robust.decode_a - TRUTH.decode_a) < abs(naive.decode_a - TRUTH.decode_a)
    assert robust.decode_a == pytest.approx(TRUTH.decode_a, rel=0.1)


def test_one_token_says_nothing_and_few_requests_are_refused():
    assert intervals([Served(10, 1, 0.0, 0.0)], []) == []
    with pytest.raises(ConfigError) as caught:
        fit_records(intervals(served(count=5), []))
    assert caught.value.field == "records"
