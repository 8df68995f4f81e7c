"""What every kind of engine promises, whatever batching runs in it: all that was added ends once, nothing is kept."""

from __future__ import annotations

from dataclasses import replace

import pytest

from controller.core.types import Outcome
from controller.policies.batching import BATCHINGS
from controller.simulator.settings import ENGINE_KINDS
from tests.controller.simulator.runs import SMALL, facts, simulate, some_demands

CASES = [("continuous", name) for name in BATCHINGS]
CASES += [("preemptive_prefill", "slo_aware_batching"), ("slackline", None)]


def test_every_kind_is_here():
    assert {kind for kind, _ in CASES} == set(ENGINE_KINDS)


@pytest.mark.parametrize(("kind", "batching"), CASES)
def test_everything_is_served_once_and_alike_twice(kind, batching):
    engine = replace(SMALL, engine_kind=kind, batching=batching, max_num_batched_tokens=1024)
    demands = some_demands(60, rate=60.0, seed=4)
    result = simulate(demands, "round_robin", (engine, engine))
    assert sorted(record.id for record in result.records) == sorted(each.id for each in demands)
    wanted = {each.id: each.output_tokens for each in demands}
    for record in result.records:
        assert record.outcome is Outcome.OK
        assert record.output_tokens == wanted[record.id] == len(record.token_times)
        assert list(record.token_times) == sorted(record.token_times)
    assert facts(result) == facts(simulate(demands, "round_robin", (engine, engine)))
