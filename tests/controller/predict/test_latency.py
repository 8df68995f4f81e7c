"""Eq. 1, 2, 5 and maturity against worked examples H1-H6."""

import math
import random

import pytest

from controller.core.errors import ConfigError
from controller.core.types import LatencyCoefficients
from controller.predict.latency import LatencyModel, OnlineFit
from controller.predict.latency_fit import DecodeSample, PrefillSample, fit, relative_least_squares, solve_nonnegative

H1 = LatencyModel(LatencyCoefficients(0.01, 1e-4, 1e-8, 0.02, 1e-7, 1e-4))
H3 = LatencyModel(LatencyCoefficients(0.01, 1e-4, 0.0, 0.02, 0.0, 0.001))


def test_h1_squares_are_summed_one_by_one():
    assert H1.prefill([100, 1000]) == pytest.approx(0.1301)
    assert H1.decode(3, 500 + 1500 + 2000) == pytest.approx(0.0207)
    assert (H1.prefill([]), H1.decode(0, 0)) == (0.0, 0.0)


def test_a_cached_prefix_counts_for_attention_only():
    assert H1.prefill([100], [1000]) == pytest.approx(0.01 + 0.01 + 1e-8 * 100 * 2100)


def test_a_mixed_step_pays_the_larger_constant_once():
    assert H1.step(100, 100 * 100, 3, 4000) == pytest.approx(0.02 + 0.01 + 1e-4 + 4e-4 + 3e-4)
    assert H1.step(0, 0, 3, 4000) == H1.decode(3, 4000)
    assert H1.step(100, 10_000, 0, 0) == H1.prefill([100])


def test_h2_fit_on_relative_error():
    rows = [((1.0, 100.0), 0.020), ((1.0, 200.0), 0.035), ((1.0, 1000.0), 0.110)]
    a, b = relative_least_squares(rows, 2)
    assert a == pytest.approx(0.0107267, rel=1e-5)
    # The worked example prints 1.03253e-4. In exact fractions it is 1.03249954e-4 (as in numpy's lstsq), at which the
    # sum of squares is smaller than with the printed value and the same a.
    assert b == pytest.approx(1.0324995e-4, rel=1e-7)

    def loss(slope):
        return sum(((a + slope * x - t) / t) ** 2 for (_, x), t in rows)

    assert loss(b) < loss(1.03253e-4)


def test_h2_plain_least_squares_is_another_fit():
    """What the relative error is for: unweighted, the long prompts decide."""
    rows = [((1.0, 100.0), 0.020), ((1.0, 200.0), 0.035), ((1.0, 1000.0), 0.110)]
    matrix = [[sum(row[i] * row[j] for row, _ in rows) for j in (0, 1)] for i in (0, 1)]
    right = [sum(row[i] * t for row, t in rows) for i in (0, 1)]
    assert solve_nonnegative(matrix, right) == pytest.approx([0.0127055, 9.76027e-5], rel=1e-5)
    assert relative_least_squares([(row, t) for row, t in rows], 2) != pytest.approx([0.0127055, 9.76027e-5], rel=1e-2)


def test_h2_exact_data_gives_the_coefficients_back():
    shapes = [(1, 4), (1, 2020), (8, 256), (64, 64), (192, 16), (4, 1024)]
    prefill = [PrefillSample(b * n, b * n * n, H1.prefill([n] * b)) for b, n in shapes]
    decode = [DecodeSample(b, b * n, H1.decode(b, b * n)) for b, n in shapes]
    found = fit(prefill, decode)
    assert found.coefficients == pytest.approx(H1.coefficients, rel=1e-6)
    assert found.prefill_p95_error < 1e-6


def test_a_fit_needs_samples():
    with pytest.raises(ConfigError, match="decode"):
        fit([PrefillSample(1, 1, 1.0)] * 3, [])


def test_coefficients_are_never_negative():
    falling = [PrefillSample(n, n * n, 1.0 / n) for n in (10, 100, 1000)]
    found = fit(falling, [DecodeSample(b, b, 0.01) for b in (1, 2, 3)])
    assert min(found.coefficients) >= 0


def test_h3_token_budget_solves_eq_7():
    assert H3.token_budget(0.7, 0.5, 0.1) == 5500
    prefill = H3.prefill_sums(5500, 0)
    assert H3.maturity(prefill, 0.1, 0.5) == pytest.approx(0.7)


@pytest.mark.parametrize(("ttft", "decode"), [(0.7, 0.493), (0.7, 0.5), (0.7, 0.6), (0.012, 0.1)])
def test_h4_budget_is_never_negative(ttft, decode):
    assert H3.token_budget(ttft, 0.5, decode) == 0


def test_h5_waiting_tokens_are_part_of_the_budget():
    assert H3.token_budget(0.7, 0.5, 0.1, waiting_tokens=2000) == 3500
    full = LatencyModel(LatencyCoefficients(0.01, 1e-4, 1e-8, 0.02, 0.0, 0.001))
    many, one = full.prefill([100] * 55), full.prefill([5500])
    assert full.maturity(many, 0.1, 0.5) == pytest.approx(0.706875)
    assert full.maturity(one, 0.1, 0.5) == pytest.approx(1.078125)


def test_h6_maturity():
    assert H3.maturity(0.2, 0.05, 0.25) == pytest.approx(0.25)
    assert H3.maturity(0.0, 0.05, 0.25) == 0.0
    assert H3.maturity(0.2, 0.3, 0.25) == math.inf
    assert H3.maturity(0.2, 0.05, math.inf) == 0.2


def test_budget_without_targets_is_unbounded():
    assert H3.token_budget(math.inf, 0.5, 0.1) > 1e9
    assert H3.token_budget(0.7, math.inf, 0.1) == 6900


def intervals(truth, count, rng):
    """What a gateway sees of an engine with these coefficients."""
    for _ in range(count):
        steps, batch, context = rng.randint(2, 20), rng.randint(1, 30), rng.randint(100, 20_000)
        tokens = rng.choice([0, 0, 200, 1500])
        squares = tokens * tokens
        seconds = steps * (truth.decode_a + truth.decode_b * context + truth.decode_c * batch)
        yield steps, batch, context, tokens, squares, seconds + truth.prefill_b * tokens + truth.prefill_c * squares


def test_online_fit_finds_an_engine_three_times_slower_than_its_profile():
    prior = LatencyCoefficients(0.005, 5e-5, 1e-9, 0.01, 1e-7, 3e-5)
    truth = LatencyCoefficients(0.005, 1.5e-4, 3e-9, 0.03, 3e-7, 9e-5)
    learned = OnlineFit(prior)
    for seen in intervals(truth, 600, random.Random(1)):
        learned.observe(*seen)
    found, wanted = LatencyModel(learned.coefficients), LatencyModel(truth)
    assert found.decode(16, 10_000) == pytest.approx(wanted.decode(16, 10_000), rel=0.1)
    assert found.prefill_sums(1000, 10**6) == pytest.approx(wanted.prefill_sums(1000, 10**6), rel=0.2)


@pytest.mark.parametrize("alone", [0, 1, 4], ids=["no prefill alone", "one", "more of them than of others"])
def test_five_intervals_correct_the_profile_of_another_machine(alone):
    """Whatever they are of: a machine that is four times as fast loses requests for each one more."""
    prior = LatencyCoefficients(0.02, 2e-4, 4e-9, 0.04, 4e-7, 1.2e-4)
    truth = LatencyCoefficients(*(each / 4 for each in prior))
    learned = OnlineFit(prior)
    for seen in intervals(truth, 5 - alone, random.Random(2)):
        learned.observe(*seen)
    for tokens in range(500, 500 + alone):
        learned.observe_prefills(1, tokens, tokens**2, LatencyModel(truth).prefill([tokens]))
    found, wanted = LatencyModel(learned.coefficients), LatencyModel(truth)
    assert found.decode(4, 5_000) == pytest.approx(wanted.decode(4, 5_000), rel=0.15)
    assert found.prefill([1000]) == pytest.approx(wanted.prefill([1000]), rel=0.15)


def test_the_first_intervals_of_a_noisy_machine_move_a_right_profile_little():
    """Each is off by half of its time or so. After a few of them predictions are off by no more than after many."""
    truth = LatencyCoefficients(0.005, 5e-5, 1e-9, 0.01, 1e-7, 3e-5)
    wanted, errors = LatencyModel(truth), [list[float]() for _ in range(50)]
    for seed in range(20):
        rng, learned = random.Random(seed), OnlineFit(truth)
        for found, (*seen, seconds) in zip(errors, intervals(truth, 50, rng), strict=True):
            learned.observe(*seen, seconds * rng.lognormvariate(0.0, 0.4))
            model = LatencyModel(learned.coefficients)
            found.append(abs(model.decode(8, 8_000) / wanted.decode(8, 8_000) - 1))
            found.append(abs(model.prefill([1000]) / wanted.prefill([1000]) - 1))
    of_few, of_many = ([sorted(each)[36] for each in part] for part in (errors[:25], errors[25:]))
    assert max(of_few) < 0.45
    assert max(of_few) < 1.1 * max(of_many)


def test_online_fit_ignores_intervals_of_nothing():
    learned = OnlineFit(H1.coefficients)
    assert learned.observe(0, 1, 1, 0, 0, 1.0) is False
    assert learned.observe(3, 1, 1, 0, 0, 0.0) is False
    assert learned.samples == 0
