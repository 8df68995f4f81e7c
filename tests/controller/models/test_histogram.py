"""Buckets and quantiles of the stored histograms."""

from __future__ import annotations

import random

import pytest

from controller.models import histogram


def test_a_value_on_a_bound_belongs_below_it():
    assert histogram.BOUNDS_S[histogram.bucket(0.1)] == 0.1
    assert histogram.bucket(0.0) == 0
    assert histogram.bucket(10_000.0) == histogram.SIZE - 1


def test_nothing_counted_has_no_quantile():
    assert histogram.quantile(histogram.empty(), 0.5) is None


def test_beyond_the_last_bound_the_bound_is_said():
    counts = histogram.empty()
    counts[-1] = 3
    assert histogram.quantile(counts, 0.99) == histogram.BOUNDS_S[-1]


@pytest.mark.parametrize("share", [0.5, 0.95, 0.99])
def test_a_quantile_lies_in_the_bucket_of_the_true_one(share):
    rng = random.Random(7)
    values = sorted(rng.lognormvariate(-1.0, 1.0) for _ in range(5_000))
    counts = histogram.empty()
    for value in values:
        counts[histogram.bucket(value)] += 1

    true = values[int(share * len(values)) - 1]

    assert abs(histogram.bucket(histogram.quantile(counts, share)) - histogram.bucket(true)) <= 1
    assert histogram.quantile(counts, share) == pytest.approx(true, rel=0.35)
