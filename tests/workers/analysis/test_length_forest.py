"""The trained forest, read as plain arrays: equal to the library, and right about answers that were cut."""

from __future__ import annotations

import numpy as np
import pytest

from controller.core.errors import ConfigError
from controller.predict.length_forest import FEW, MAGIC, LengthForest
from workers.analysis.length_forest import LEAF, as_arrays, fitted, train

NAMES = ("a", "b", "c")
LEVELS = (0.1, 0.5, 0.9)


def sample(count, seed=0):
    """Features and lengths: exponential around a mean that depends on the first feature."""
    rng = np.random.default_rng(seed)
    features = rng.normal(size=(count, len(NAMES)))
    lengths = np.ceil(rng.exponential(200 * np.exp(features[:, 0])))
    return features, lengths.astype(np.int64)


@pytest.fixture(scope="module")
def model():
    features, lengths = sample(1_000)
    return fitted(features, lengths, np.ones(len(lengths), dtype=bool), seed=1)


@pytest.fixture(scope="module")
def forest(model):
    return as_arrays(model, NAMES, {"answers": 1_000})


def test_it_is_the_library_s_own_forest(model, forest):
    asked, _ = sample(100, seed=2)
    ours = [forest.quantiles(row, LEVELS) for row in asked]
    assert np.abs(np.array(ours) - model.predict(asked, quantiles=list(LEVELS))).max() < 1e-9


def test_as_a_file_it_is_the_same(forest):
    again = LengthForest.from_bytes(forest.to_bytes())
    assert (again.names, again.about) == (NAMES, {"answers": 1_000})
    asked, _ = sample(20, seed=3)
    assert [again.quantiles(row, LEVELS, 50) for row in asked] == [forest.quantiles(row, LEVELS, 50) for row in asked]


def test_with_tokens_produced_only_longer_answers_count(forest):
    row = [0.0, 0.0, 0.0]
    ranks = forest._ranks(row)
    members = forest.lengths[ranks]
    for produced in (0, 20, 50):
        assert len(np.unique(ranks[members > produced])) >= FEW
        expected = np.quantile(members[members > produced], LEVELS)
        assert forest.quantiles(row, LEVELS, produced) == pytest.approx(list(expected))
    assert forest.quantiles(row, LEVELS, 10**6) == [10**6 + 1] * 3


def test_of_few_longer_answers_alone_no_quantile_is_read():
    """A kind with two long answers of 400, and another that says how long such answers get. The upper of two is no
    bound that nine of ten stay within."""
    rng = np.random.default_rng(7)
    short, long = rng.integers(5, 40, 398), rng.integers(60, 200, 400)
    lengths = np.concatenate((short, [65, 70], long)).astype(np.int64)
    features = np.zeros((len(lengths), len(NAMES)))
    features[400:, 0] = 1.0
    found = train(NAMES, features, lengths, np.ones(len(lengths), dtype=bool))
    row = [0.0] * len(NAMES)
    assert len(np.unique(found._ranks(row)[found.lengths[found._ranks(row)] > 50])) <= 2
    of_all = float(np.quantile(lengths[lengths > 50], 0.9))
    assert of_all * 0.95 <= found.quantiles(row, (0.9,), 50)[0] <= of_all
    assert found.quantiles(row, (0.1, 0.9), 50) == sorted(found.quantiles(row, (0.1, 0.9), 50))
    assert found.quantiles(row, (0.9,), 190)[0] > 190, "none of its own was as long"
    cut = train(NAMES, features, lengths, lengths < 150)
    assert cut.quantiles(row, (0.9,), 50)[0] > 100


def test_answers_that_were_cut_do_not_shorten_the_bound():
    """Cut at random, the forest still finds what the whole answers would have shown; taken for whole it would not."""
    features, lengths = sample(4_000, seed=4)
    limits = np.ceil(np.random.default_rng(5).exponential(400, len(lengths))).astype(np.int64)
    ended, seen = lengths <= limits, np.minimum(lengths, limits)
    whole = train(NAMES, features, lengths, np.ones(len(lengths), dtype=bool))
    cut = train(NAMES, features, seen, ended)
    naive = train(NAMES, features, seen, np.ones(len(lengths), dtype=bool))
    asked, _ = sample(60, seed=6)
    medians = {
        name: np.median([each.quantiles(row, (0.5,))[0] / whole.quantiles(row, (0.5,))[0] for row in asked])
        for name, each in (("cut", cut), ("naive", naive))
    }
    assert medians["cut"] == pytest.approx(1.0, abs=0.1)
    assert medians["naive"] < 0.85


def test_one_cut_answer_gives_its_weight_to_the_longer_ones():
    """Kaplan-Meier by hand: 1, 2+ (cut), 3, 4. Survival beyond 1 is 3/4; at 3 one of two that remain ends."""
    one = {name: np.array([0], dtype=np.int32) for name in ("left", "right", "roots", "begin")}
    forest = LengthForest(
        names=NAMES,
        feature=np.array([-1], dtype=np.int32),
        threshold=np.zeros(1),
        **one,
        end=np.array([4], dtype=np.int32),
        members=np.arange(4, dtype=np.int32),
        lengths=np.array([1, 2, 3, 4], dtype=np.int32),
        ended=np.array([True, False, True, True]),
        about={},
    )
    # Weights 1, 0, 1.5, 1.5: ranks 1 to 4 hold 1; between 1 and 2 it rises to 3; from 2.5 to 3.5 to 4.
    assert forest.quantiles([0, 0, 0], (0.0, 0.5, 1.0)) == pytest.approx([1.0, 3.0, 4.0])


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "no length forest of this version"),
        (MAGIC.replace(b"1\n", b"2\n") + b"x" * 100, "no length forest of this version"),
        (MAGIC + b"x" * 100, "digest"),
    ],
)
def test_what_is_no_forest_is_refused(content, message):
    with pytest.raises(ConfigError, match=message):
        LengthForest.from_bytes(content)


def test_a_damaged_file_is_refused(forest):
    content = bytearray(forest.to_bytes())
    content[-1] ^= 1
    with pytest.raises(ConfigError, match="digest"):
        LengthForest.from_bytes(bytes(content))


@pytest.mark.parametrize(
    ("name", "value"),
    [("left", -1), ("right", 10**6), ("feature", 3), ("members", 10**6), ("roots", -5), ("begin", -1)],
)
def test_arrays_that_point_outside_are_refused(forest, name, value):
    """With a right digest: whoever writes the file could, and serving must not fail later."""
    wrong = {each: getattr(forest, each) for each in forest.__dataclass_fields__}
    wrong[name] = np.full_like(wrong[name], value)
    with pytest.raises(ConfigError, match="points outside"):
        LengthForest.from_bytes(LengthForest(**wrong).to_bytes())


def test_other_features_and_too_few_answers_are_refused(forest):
    with pytest.raises(ValueError, match="2 features, and this forest has 3"):
        forest.quantiles([1.0, 2.0], LEVELS)
    features, lengths = sample(2 * LEAF - 1)
    with pytest.raises(ValueError, match="needs at least 40"):
        train(NAMES, features, lengths, np.ones(len(lengths), dtype=bool))


def test_the_same_answers_give_the_same_forest():
    features, lengths = sample(200)
    ended = np.ones(len(lengths), dtype=bool)
    assert train(NAMES, features, lengths, ended).to_bytes() == train(NAMES, features, lengths, ended).to_bytes()
