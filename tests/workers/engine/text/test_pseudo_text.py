from array import array
from statistics import median, quantiles

from workers.engine.text.pseudo_text import MEDIAN_TOKENS, VOCABULARY, WORDS, natural_length, seed_of, token_at
from workers.engine.text.tokenizer import decode


def seeds(count: int) -> list[int]:
    return [seed_of(0, array("q", [number])) for number in range(count)]


def test_words_are_one_token_each():
    assert len(set(VOCABULARY)) == len(WORDS)
    assert decode(VOCABULARY[:2]) == " the and"


def test_text_depends_on_seed_and_prompt_only():
    prompt = array("q", [1, 2, 3])
    assert seed_of(7, prompt) == seed_of(7, array("q", [1, 2, 3]))
    assert len({seed_of(7, prompt), seed_of(8, prompt), seed_of(7, array("q", [1, 2]))}) == 3


def test_pinned_text():
    """Another text for the same seed would break replays: change it knowingly."""
    seed = seed_of(0, array("q", [1, 2, 3]))
    assert decode(token_at(seed, index) for index in range(4)) == " run got the our"


def test_words_are_spread_evenly():
    seed = seed_of(0, array("q", [1]))
    counts = dict.fromkeys(VOCABULARY, 0)
    for index in range(8400):
        counts[token_at(seed, index)] += 1
    assert 50 < min(counts.values()) <= max(counts.values()) < 160


def test_natural_lengths_follow_the_documented_distribution():
    lengths = [natural_length(seed) for seed in seeds(4000)]
    assert abs(median(lengths) / MEDIAN_TOKENS - 1) < 0.08
    assert abs(quantiles(lengths, n=10)[-1] / 357 - 1) < 0.1
    assert min(lengths) >= 1
