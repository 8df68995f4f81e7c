"""Small clusters and workloads for tests."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from controller.core.types import LatencyCoefficients, Targets
from controller.dispatch import build_dispatcher
from controller.simulator import Demand, InstanceSettings, Simulation, SimulationSettings

PATIENT = Targets(1.0, 0.1, None, 3600.0)
FAST = LatencyCoefficients(0.004, 5e-5, 1e-9, 0.006, 1e-7, 1e-4)
SMALL = InstanceSettings(
    FAST, kv_tokens=4096, max_num_seqs=8, max_num_batched_tokens=256, max_model_len=1024, prefix_caching=False
)


def some_demands(count=60, rate=20.0, seed=0, longest=400, targets=PATIENT):
    rng = np.random.default_rng(seed)
    at = np.cumsum(rng.exponential(1 / rate, count))
    prompts, outputs = rng.integers(1, longest, count), rng.integers(1, 60, count)
    return [
        Demand(
            f"r{i}", float(at[i]), int(prompts[i]), int(outputs[i]), targets, f"c{i % 3}", max_tokens=int(outputs[i])
        )
        for i in range(count)
    ]


def simulate(demands, policy="slackline", instances=(SMALL, SMALL), overrides=None, keep=True, **settings):
    chosen = SimulationSettings(tuple(instances), **settings)
    return Simulation(chosen, build_dispatcher(policy, overrides), demands, keep_token_times=keep).run()


def with_batching(name, **changes):
    return replace(SMALL, batching=name, **changes)


def facts(result):
    """All that a request experienced, to the bit."""
    return {
        r.id: (r.outcome, r.instance, r.queue_s, r.ttft_s, r.e2e_s, tuple(r.token_times or ()), r.preemptions)
        for r in result.records
    }
