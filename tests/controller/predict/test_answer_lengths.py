"""What a gateway expects of the length of an answer: a mean at first, a trained forest once one is in force."""

from __future__ import annotations

import numpy as np
import pytest

from controller.predict.answer_lengths import FEATURES, TARGET, AnswerLengths, LengthsInForce
from workers.analysis.length_forest import train

KIND = ("acme", "chat", "llama")


def forest(low=50, high=150, seed=0):
    """Answers of a tenth of the prompt's tokens, give or take a half."""
    rng = np.random.default_rng(seed)
    prompts = rng.integers(100, 2_000, 600)
    features = np.zeros((600, len(FEATURES)))
    features[:, 0] = prompts
    lengths = np.maximum(1, prompts * rng.uniform(low, high, 600) / 1_000).astype(np.int64)
    return train(FEATURES, features, lengths, np.ones(600, dtype=bool))


@pytest.fixture(scope="module")
def trained():
    return forest()


def test_without_a_forest_it_is_the_mean_of_its_kind():
    lengths = AnswerLengths()
    for tokens in (40, 50, 60):
        told = lengths.foretell(KIND, "", 100, 64)
        lengths.observe(KIND, "", told, tokens, ended=True)
    told = lengths.foretell(KIND, "", 100, 64)
    assert (told.expected, told.bounds, told.version) == (50, None, None)
    assert dict(zip(FEATURES, told.features, strict=True))["max_tokens"] == 64


def test_with_a_forest_bounds_follow_the_request(trained):
    lengths = AnswerLengths()
    lengths.take({"llama": LengthsInForce(3, trained)})
    short, long = (lengths.foretell(KIND, "", prompt, None) for prompt in (200, 1_800))
    assert short.version == long.version == 3
    assert short.bounds[0] <= short.expected <= short.bounds[1] < long.bounds[0] <= long.expected <= long.bounds[1]
    assert lengths.foretell(("acme", "chat", "other"), "", 200, None).bounds is None, "another model has none"


def test_neither_bound_is_beyond_max_tokens(trained):
    lengths = AnswerLengths()
    lengths.take({"llama": LengthsInForce(1, trained)})
    told = lengths.foretell(KIND, "", 1_800, 10)
    assert (told.expected, told.bounds) == (10, (10, 10))


def test_the_level_rises_while_bounds_are_too_low_and_starts_again_with_a_version(trained):
    lengths = AnswerLengths()
    lengths.take({"llama": LengthsInForce(1, trained)})
    for _ in range(5):
        lengths.observe(KIND, "", lengths.foretell(KIND, "", 500, None), 10_000, ended=True)
    assert lengths.level("llama") > TARGET
    assert lengths.hits["llama"] == (5, 0)
    lengths.take({"llama": LengthsInForce(2, trained)})
    assert lengths.level("llama") == TARGET
    assert not lengths.hits


def test_an_answer_told_by_an_earlier_version_does_not_judge_this_one(trained):
    lengths = AnswerLengths()
    lengths.take({"llama": LengthsInForce(1, trained)})
    told = lengths.foretell(KIND, "", 500, None)
    lengths.take({"llama": LengthsInForce(2, trained)})
    lengths.observe(KIND, "", told, 10_000, ended=True)
    assert not lengths.hits


def test_an_answer_that_was_cut_below_its_bound_says_nothing(trained):
    lengths = AnswerLengths()
    lengths.take({"llama": LengthsInForce(1, trained)})
    told = lengths.foretell(KIND, "", 1_800, 20)
    lengths.observe(KIND, "", told, 20, ended=False)
    assert not lengths.hits
    assert lengths.foretell(KIND, "", 1_800, None).features[2] == 0, "nor is it one of the mean of whole answers"


def test_a_running_answer_is_bounded_again_by_what_it_has_produced(trained):
    lengths = AnswerLengths()
    told = lengths.foretell(KIND, "", 500, None)
    assert lengths.bounds_again("llama", told, 50) is None, "without a forest"
    lengths.take({"llama": LengthsInForce(1, trained)})
    told = lengths.foretell(KIND, "", 500, 120)
    low, high = lengths.bounds_again("llama", told, 60)
    assert 60 <= low <= high
    assert told.bounds[1] <= high <= 120
    assert lengths.bounds_again("llama", told, 5_000) == (5_000, 5_000), "beyond its cap there is nothing to come"
