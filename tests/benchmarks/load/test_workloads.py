"""Mixes have the lengths, shares and rates of HyperFlexis Table 1."""

import math
import statistics

import numpy as np
import pytest

from benchmarks.load.workloads import FOUR_TASKS, MIXES, TWO_TASKS, burst, sustained
from controller.core.errors import ConfigError
from controller.simulator.workloads.arrivals import Lengths
from controller.simulator.workloads.mixes import demands


@pytest.mark.parametrize("task", [*FOUR_TASKS, *TWO_TASKS], ids=lambda task: task.name)
def test_lengths_keep_the_mean_of_the_table(task):
    rng = np.random.default_rng(3)
    for lengths in (task.prompt, task.output):
        drawn = lengths.draw(rng, 20_000)
        assert drawn.min() >= lengths.low
        assert drawn.max() <= lengths.high
        # Truncation costs sharegpt's long tail up to 8 % of its mean.
        assert drawn.mean() == pytest.approx(lengths.mean, rel=0.08 if lengths.law == "lognormal" else 0.05)


def test_prompt_and_output_fit_the_context():
    for task in (*FOUR_TASKS, *TWO_TASKS):
        assert task.prompt.high + task.output.high <= 4096


def test_burst_has_an_equal_number_of_each_task():
    plan = burst(FOUR_TASKS, rate=40, seed=1, per_task=50)
    counts = {task.name: sum(a.task is task for a in plan) for task in FOUR_TASKS}
    assert set(counts.values()) == {50}
    assert [a.at for a in plan] == sorted(a.at for a in plan)


def test_sustained_load_offers_the_asked_rate():
    offered = [len(sustained(FOUR_TASKS, rate=40, seed=seed, duration_s=60)) / 60 for seed in range(12)]
    # The mean of 12 Poisson counts of 2,400 has a deviation of 0.6 %.
    assert statistics.fmean(offered) == pytest.approx(40, rel=0.02)


def test_gaps_are_exponential_and_never_cut():
    plan = burst(FOUR_TASKS[:1], rate=10, seed=5, per_task=4000)
    gaps = np.diff([a.at for a in plan])
    assert gaps.mean() == pytest.approx(0.1, rel=0.05)
    assert gaps.std() == pytest.approx(0.1, rel=0.08)
    beyond_three_means = (gaps > 0.3).mean()
    assert beyond_three_means == pytest.approx(math.exp(-3), rel=0.3)


def test_seeds_differ_and_repeat():
    first, again, other = (burst(MIXES["2-task"], 10, seed, per_task=5) for seed in (1, 1, 2))
    assert first == again
    assert [a.prompt for a in first] != [a.prompt for a in other]
    assert len({a.prompt[:8] for a in first}) == len(first)  # no shared prefix


def test_body_asks_for_the_exact_length():
    arrival = burst(FOUR_TASKS, 10, 1, per_task=1)[0]
    body = arrival.body("mid", slo_class=arrival.task.name)
    assert (body["max_tokens"], body["ignore_eos"], body["stream"]) == (arrival.output_tokens, True, True)
    assert len(body["prompt"]) == len(arrival.prompt)
    assert body["slo_class"] == arrival.task.name


def test_a_rate_must_be_positive():
    with pytest.raises(ConfigError, match="rate"):
        burst(FOUR_TASKS, 0, 1)


def test_lognormal_has_the_given_moments():
    drawn = Lengths(100, 120, 1, 10**9, "lognormal").draw(np.random.default_rng(1), 200_000)
    assert drawn.mean() == pytest.approx(100, rel=0.02)
    assert drawn.std() == pytest.approx(120, rel=0.06)


def test_a_real_run_and_a_simulated_one_of_a_seed_are_the_same_requests():
    real, simulated = burst(MIXES["4-task"], 20, 7, per_task=9), demands(MIXES["4-task"], 20, 7, per_task=9)
    assert [(a.at, a.task.name, len(a.prompt), a.output_tokens) for a in real] == [
        (d.at, d.slo_class, d.prompt_tokens, d.output_tokens) for d in simulated
    ]
