"""What an engine learns of the costs of lost KV from the steps that ran."""

from __future__ import annotations

import random
import statistics

import pytest

from controller.core.steps import Chunk, Seq, Step
from controller.engine.kv_costs import KvCosts, MeasuredCosts


def ran(costs: KvCosts, decodes: int, prompt: int = 0, times: int = 30) -> None:
    """Steps of 5 ms, 0.5 ms a sequence that decodes and 0.1 ms a prompt token."""
    seqs = tuple(Seq(f"d{at}", 0.0, 8, 8) for at in range(decodes))
    chunks = (Chunk(Seq("p", 0.0, prompt, 1), 0, prompt, True),) if prompt else ()
    for _ in range(times):
        costs.observe(Step(1, chunks, seqs, 0), 5e-3 + 5e-4 * decodes + 1e-4 * prompt)


@pytest.mark.parametrize(("alone", "beside", "prompt"), [(1, 60, 16), (64, 8, 100), (33, 60, 16), (60, 33, 16)])
def test_a_batch_of_another_size_teaches_nothing_of_prompts(alone: int, beside: int, prompt: int) -> None:
    costs = KvCosts(16, MeasuredCosts(prefill_s={500: 1e-4}))
    ran(costs, alone)
    ran(costs, beside, prompt)
    assert costs.recompute_s(500) == pytest.approx(0.05, rel=0.2)


def test_prompts_beside_as_many_decodes_as_were_seen_without_them_are_learned() -> None:
    costs = KvCosts(16)
    ran(costs, 60)
    ran(costs, 60, 100)
    assert costs.recompute_s(500) == pytest.approx(0.05, rel=0.05)


def test_short_prompts_are_not_charged_for_decodes_that_vary_in_number() -> None:
    """The differences between such batches are many times what a short prompt takes."""
    costs, chance = KvCosts(16), random.Random(1)
    learned = []
    for _ in range(600):
        ran(costs, chance.randint(33, 63), times=1)
        ran(costs, chance.randint(33, 63), 16, times=1)
        learned.append(costs.recompute_s(500) or 0.0)
    assert statistics.median(learned[100:]) == pytest.approx(0.05, rel=0.3)


def test_prompts_alone_are_learned_with_the_time_of_their_step() -> None:
    costs = KvCosts(16)
    ran(costs, 0, 1000)
    assert costs.recompute_s(1000) == pytest.approx(0.105, rel=0.05)
