"""What a gateway expects of the length of an answer: a mean at first, a trained forest once one is in force."""

from __future__ import annotations

import numpy as np
import pytest

from controller.predict.answer_lengths import (
    FEATURES,
    MOST_LEVEL,
    PRODUCED,
    TARGET,
    AnswerBounds,
    AnswerLengths,
    LengthsInForce,
    with_bounds,
)
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
    assert lengths.hits("llama") == (5, 0)
    lengths.take({"llama": LengthsInForce(2, trained)})
    assert lengths.level("llama") == TARGET
    assert lengths.hits("llama") == (0, 0)


def test_an_answer_told_by_an_earlier_version_does_not_judge_this_one(trained):
    lengths = AnswerLengths()
    lengths.take({"llama": LengthsInForce(1, trained)})
    told = lengths.foretell(KIND, "", 500, None)
    lengths.take({"llama": LengthsInForce(2, trained)})
    lengths.observe(KIND, "", told, 10_000, ended=True)
    assert lengths.hits("llama") == (0, 0)


def test_an_answer_that_was_cut_below_its_bound_says_nothing(trained):
    lengths = AnswerLengths()
    lengths.take({"llama": LengthsInForce(1, trained)})
    told = lengths.foretell(KIND, "", 1_800, 20)
    lengths.observe(KIND, "", told, 20, ended=False)
    assert lengths.hits("llama") == (0, 0)
    assert lengths.foretell(KIND, "", 1_800, None).features[2] == 0, "nor is it one of the mean of whole answers"


def test_a_running_answer_is_bounded_again_by_what_it_has_produced(trained):
    lengths = AnswerLengths()
    told = lengths.foretell(KIND, "", 500, None)
    assert lengths.bounds_again("llama", told, 50) is None, "without a forest"
    lengths.take({"llama": LengthsInForce(1, trained)})
    told = lengths.foretell(KIND, "", 500, 120)
    produced, low, high, version = lengths.bounds_again("llama", told, 60)
    assert (produced, version) == (60, 1)
    assert 60 <= low <= high
    assert told.bounds[1] <= high <= 120
    again = lengths.bounds_again("llama", told, 5_000)
    assert (again.lower, again.upper) == (5_000, 5_000), "beyond its cap there is nothing to come"


def missed(lengths, out, times=5):
    """Answers that their clients left, of far more tokens than the bound that was predicted with `out` of them out."""
    for _ in range(times):
        told = lengths.foretell(KIND, "", 500, None)
        lengths.cut_off("llama", told._replace(bounds=None), 10_000, [lengths.bounds_again("llama", told, out)])


def test_each_count_of_tokens_out_has_a_level_of_its_own(trained):
    lengths = AnswerLengths()
    lengths.take({"llama": LengthsInForce(1, trained)})
    missed(lengths, 430)
    assert [lengths.level("llama", out) > TARGET for out in (0, 50, 399, 400, 2_000)] == [False] * 3 + [True] * 2
    assert (lengths.hits("llama", 400), lengths.hits("llama", 200)) == ((5, 0), (0, 0))
    told = lengths.foretell(KIND, "", 1_800, None)
    before = lengths.bounds_again("llama", told, 60).upper
    missed(lengths, 60, times=30)
    assert lengths.bounds_again("llama", told, 60).upper > before, "it is asked at that level"
    lengths.take({"llama": LengthsInForce(2, trained)})
    assert lengths.level("llama", 400) == TARGET


def test_bounds_of_another_version_do_not_judge_this_one(trained):
    """The version changed while the answer ran: its later bounds are of this one, and the first one is not."""
    lengths = AnswerLengths()
    lengths.take({"llama": LengthsInForce(1, trained)})
    told = lengths.foretell(KIND, "", 500, None)
    early = lengths.bounds_again("llama", told, 50)
    lengths.take({"llama": LengthsInForce(2, trained)})
    late = lengths.bounds_again("llama", told, 100)
    lengths.observe(KIND, "", told, 10_000, ended=True, again=(early, late))
    assert [lengths.hits("llama", out).answers for out in (0, 50, 100)] == [0, 0, 1]


def test_the_first_bound_of_each_count_of_tokens_judges():
    """One long answer must not move a level as often as it was asked about."""
    kept = ()
    for produced in (50, 103, 155, 210, 260, 405, 460):
        kept = with_bounds(kept, AnswerBounds(produced, 1, 2, 1))
    assert [each.produced for each in kept] == [50, 103, 210, 405]


def test_levels_go_on_in_the_next_process(trained):
    lengths, after = AnswerLengths(), AnswerLengths()
    lengths.take({"llama": LengthsInForce(1, trained)})
    missed(lengths, 100)
    after.restore(lengths.state())
    after.take({"llama": LengthsInForce(1, trained)})
    assert [after.level("llama", out) for out in PRODUCED] == [lengths.level("llama", out) for out in PRODUCED]
    assert after.hits("llama", 100) == (5, 0)


def test_a_state_of_an_older_release_has_the_level_of_arrivals_alone(trained):
    """Which is still where that release would look for it."""
    state = AnswerLengths().state()
    state["levels"] = {"llama": [1, 0.95, 40, 30]}
    del state["later_levels"]
    lengths = AnswerLengths()
    lengths.restore(state)
    lengths.take({"llama": LengthsInForce(1, trained)})
    assert (lengths.level("llama"), lengths.hits("llama")) == (0.95, (40, 30))
    assert (lengths.level("llama", 50), lengths.hits("llama", 50)) == (TARGET, (0, 0))
    assert lengths.state()["levels"] == {"llama": [1, 0.95, 40, 30]}


@pytest.mark.parametrize(
    "later", [{"llama": 3}, {"llama": [[50, 0.9]]}, {"llama": [[50, "x", 1, 1]]}, {"llama": None}, [1], None]
)
def test_later_levels_that_cannot_be_read_change_nothing(trained, later):
    state = AnswerLengths().state() | {"levels": {"llama": [1, 0.95, 40, 30]}, "later_levels": later}
    lengths = AnswerLengths()
    with pytest.raises((KeyError, TypeError, ValueError)):
        lengths.restore(state)
    lengths.take({"llama": LengthsInForce(1, trained)})
    assert lengths.level("llama") == TARGET


def test_levels_stay_within_their_limits_and_unknown_counts_of_tokens_are_left_out(trained):
    levels = {"levels": {"llama": [1, 0.95, 40, 30]}, "later_levels": {"llama": [[50, 7.0, 1, 1], [75, 0.9, 1, 1]]}}
    lengths = AnswerLengths()
    lengths.restore(AnswerLengths().state() | levels)
    lengths.take({"llama": LengthsInForce(1, trained)})
    assert [lengths.level("llama", out) for out in (0, 75)] == [0.95, MOST_LEVEL]


def test_two_gateways_with_the_same_history_foretell_the_same(trained):
    """And by what they have seen alone: one that a workflow's last call did not come to knows one call less of it."""
    gateways = AnswerLengths(), AnswerLengths()
    for each in gateways:
        each.take({"llama": LengthsInForce(3, trained)})
    for number in range(40):
        workflow, prompt = f"w{number % 4}", 200 + 40 * number
        told = [each.foretell(KIND, workflow, prompt, None) for each in gateways]
        assert told[0] == told[1]
        for each in gateways:
            later = each.bounds_again("llama", told[0], 50)
            each.observe(KIND, workflow, told[0], prompt // 9, ended=True, again=(later,))
    assert gateways[0].state() == gateways[1].state()
    gateways[0].observe(KIND, "w1", gateways[0].foretell(KIND, "w1", 900, None), 100, ended=True)
    first, second = (
        dict(zip(FEATURES, each.foretell(KIND, "w1", 900, None).features, strict=True)) for each in gateways
    )
    assert first["workflow_calls"] == second["workflow_calls"] + 1 == 11
    restored = AnswerLengths()
    restored.restore(gateways[0].state())
    restored.take(gateways[0].in_force)
    assert restored.foretell(KIND, "w1", 900, None) == gateways[0].foretell(KIND, "w1", 900, None)
