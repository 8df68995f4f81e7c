"""SCORPIO's credits and the annealed order of a queue."""

from dataclasses import replace

import numpy as np
import pytest

from controller.core.errors import ConfigError
from controller.core.steps import Added, Chunk, Seq, Step, StepRan
from controller.policies.batching.credit_based import CreditBased
from controller.policies.batching.simulated_annealing import (
    SimulatedAnnealing,
    SimulatedAnnealingConfig,
    anneal,
    moved,
    value,
)
from tests.controller.policies.batching.view import FakeView
from tests.controller.simulator.runs import SMALL, facts, simulate, some_demands, with_batching


def decoding(name, tpot):
    return Seq(name, 0.0, 10, 100, computed=10, output_tokens=1, tpot_s=tpot)


def steps(policy, seqs, count):
    """Who decoded in each of `count` steps."""
    view, ran = FakeView(seqs), []
    for number in range(count):
        grants = policy.compose(view, 0.0)
        step = Step(number, (), tuple(grant.seq for grant in grants), 0)
        for seq in step.decodes:
            seq.output_tokens += 1
            seq.computed += 1
        policy.observe(StepRan(step, 1, 0.01), 0.0)
        ran.append("".join(grant.seq.id for grant in grants))
    return ran


def begun(policy, seqs):
    for seq in seqs:
        policy.observe(Added(seq), 0.0)
    return policy


def test_looser_targets_decode_in_their_share_of_the_steps():
    seqs = [decoding("a", 0.05), decoding("b", 0.1), decoding("c", 0.2)]
    assert steps(begun(CreditBased(), seqs), seqs, 8) == ["a", "ab", "a", "abc", "a", "ab", "a", "abc"]


def test_equal_targets_all_decode_in_every_step():
    seqs = [decoding("a", 0.1), decoding("b", 0.1)]
    assert steps(begun(CreditBased(), seqs), seqs, 3) == ["ab"] * 3


def test_when_the_tightest_ends_the_next_tightest_is_the_measure():
    seqs = [decoding("b", 0.1), decoding("c", 0.2)]
    policy = begun(CreditBased(), seqs)
    assert steps(policy, seqs, 4) == ["b", "bc", "b", "bc"]


def test_a_sequence_without_a_target_never_stands_still():
    seqs = [decoding("a", 0.1), decoding("z", float("inf"))]
    assert steps(begun(CreditBased(), seqs), seqs, 2) == ["az", "az"]


def test_in_an_engine_the_loose_keep_their_pace_and_the_tight_are_faster():
    demands = some_demands(80, rate=30.0, seed=4)
    mixed = [replace(d, targets=d.targets._replace(tpot_s=0.02 if i % 2 else 0.2)) for i, d in enumerate(demands)]
    plain = simulate(mixed, "round_robin", (SMALL,))
    credit = simulate(mixed, "round_robin", (with_batching("credit_based"),))

    def pace(result, tpot_s):
        return np.mean([r.tpot_s for r in result.records if r.tpot_s and r.targets.tpot_s == tpot_s])

    assert len(credit.records) == len(mixed)
    assert pace(credit, 0.2) > 3 * pace(plain, 0.2)
    assert pace(credit, 0.02) < pace(plain, 0.02)
    assert facts(credit) == facts(simulate(mixed, "round_robin", (with_batching("credit_based"),)))


# ---- simulated annealing ------------------------------------------------------------------------------------------

CONFIG = SimulatedAnnealingConfig(prefill_a=0.0, prefill_b=0.001, decode_s=0.0)


def waiting(name, tokens, due):
    return Seq(name, 0.0, tokens, 1, due=due)


def test_value_is_requests_in_time_over_latency():
    # Ends at 1 and 4: one in time, 5 s of latency; the other way round at 3 and 4: both in time, 7 s.
    short, long = waiting("short", 1000, 9.0), waiting("long", 3000, 3.5)
    assert value([short, long], CONFIG, 0.0) == pytest.approx(1 / 5)
    assert value([long, short], CONFIG, 0.0) == pytest.approx(2 / 7)
    assert value([], CONFIG, 0.0) == 0.0


def test_moves_exchange_put_off_and_pull_forward():
    order = [waiting(name, 1, 1.0) for name in "abc"]

    def after(*numbers):
        return "".join(seq.id for seq in moved(order, *numbers))

    assert after(0.0, 0.0, 0.9) == "cba"
    assert after(0.5, 0.0, 0.0) == "bca"
    assert after(0.9, 0.9, 0.0) == "cab"


def test_it_finds_the_order_that_meets_both():
    order = [waiting("short", 1000, 9.0), waiting("long", 3000, 3.5)]
    draws = np.random.default_rng(1).random((50, 4))
    best, top = anneal(order, CONFIG, draws, 0.0)
    assert [seq.id for seq in best] == ["long", "short"]
    assert top == pytest.approx(2 / 7)


def test_it_is_never_worse_than_the_order_it_began_with():
    rng = np.random.default_rng(3)
    for seed in range(20):
        order = [waiting(f"{i}", int(rng.integers(10, 2000)), float(rng.uniform(0.5, 8))) for i in range(8)]
        best, top = anneal(order, CONFIG, np.random.default_rng(seed).random((60, 4)), 0.0)
        assert top >= value(order, CONFIG, 0.0)
        assert sorted(seq.id for seq in best) == sorted(seq.id for seq in order)


def test_prompts_run_in_the_annealed_order():
    policy = SimulatedAnnealing(CONFIG)
    short, long = waiting("short", 1000, 9.0), waiting("long", 3000, 3.5)
    for seq in (short, long):
        policy.observe(Added(seq), 0.0)
    view = FakeView([], [short, long], token_budget=4000)
    assert [grant.seq.id for grant in policy.compose(view, 0.0)] == ["long", "short"]
    policy.observe(StepRan(Step(1, (Chunk(long, 0, 3000, True),), (), 0), 1, 3.0), 3.0)
    assert [seq.id for seq in policy._order] == ["short"]


def test_the_same_seed_gives_the_same_run():
    engine = with_batching("simulated_annealing")
    assert facts(simulate(some_demands(), instances=(engine,))) == facts(simulate(some_demands(), instances=(engine,)))


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"window": 1}, "window"),
        ({"temperature": 0}, "temperature"),
        ({"cooling": 1.5}, "cooling"),
        ({"iterations": -1}, "iterations"),
        ({"prefill_a": -1}, "prefill_a"),
    ],
)
def test_bad_settings_are_named(change, field):
    with pytest.raises(ConfigError) as caught:
        SimulatedAnnealingConfig(**change)
    assert caught.value.field == field
