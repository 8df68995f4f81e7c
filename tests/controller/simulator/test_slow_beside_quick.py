"""Instances that cannot keep what others keep."""

from dataclasses import replace

import numpy as np
import pytest

from controller.core.types import LatencyCoefficients, Targets
from controller.simulator import Demand, InstanceSettings
from tests.controller.simulator.runs import simulate

A100 = LatencyCoefficients(0.0066, 5.54e-5, 1.52e-9, 0.0115, 8.2e-8, 3.66e-5)  # Llama-3.1-8B
QUICK = InstanceSettings(A100, max_num_seqs=64, prefix_caching=False)
SLOW = replace(QUICK, latency=LatencyCoefficients(*(8 * each for each in A100)))  # 92 ms a step
LOOSE = Targets(2.0, 0.2, None, 10.0)


def two_kinds(rate, seconds, tight, seed=5):
    """Half of the requests have the `tight` targets, the others loose ones."""
    rng = np.random.default_rng(seed)
    at = np.cumsum(rng.exponential(1 / rate, int(rate * seconds)))
    return [
        Demand(f"{'tight' if i % 2 else 'loose'}{i}", float(t), 200, 40, tight if i % 2 else LOOSE, "c", max_tokens=40)
        for i, t in enumerate(at)
    ]


@pytest.mark.parametrize(
    "tight", [Targets(1.0, 0.05, None, 10.0), Targets(2.0, 2.0, 2.5, 10.0)], ids=["pace", "deadline"]
)
@pytest.mark.parametrize("slow_at", [0, 2])
def test_what_an_instance_cannot_keep_even_alone_goes_to_one_that_can(tight, slow_at):
    """An answer takes 0.5 s on two of the instances and 3.8 s on the third, which the loose half may take. It was sent
    a third of the tight half too. Until its steps were measured a profile may be wrong, so the first may be late."""
    instances = [QUICK, QUICK]
    instances.insert(slow_at, SLOW)
    result = simulate(two_kinds(6.0, 40, tight), instances=instances)
    late = [record.id for record in result.records if not record.attained]
    assert len(result.records) == 240
    assert len(late) <= 3, late
    assert {record.instance for record in result.records if record.id.startswith("loose")} == {
        f"engine-{number}" for number in range(3)
    }


def test_it_goes_there_when_no_other_takes_it():
    """The quick one drains after a while: a late answer is better than none."""
    tight = Targets(1.0, 0.05, None, 10.0)
    demands = [Demand(f"r{i}", i * 0.5, 200, 10, tight, "c", max_tokens=10) for i in range(40)]
    result = simulate(demands, instances=(SLOW, replace(QUICK, until_s=10.0)))
    assert {record.outcome for record in result.records} <= {"ok", "refused"}
    assert sum(record.outcome == "ok" for record in result.records) >= 20
