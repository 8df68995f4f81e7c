"""The requests that a gateway learns lengths from end where they should, and not because of what it could read."""

from __future__ import annotations

import json
from array import array

import numpy as np

from benchmarks.analyzer.live import MAX_TOKENS, body
from workers.engine.text.pseudo_text import natural_length, seed_of


def test_the_cap_is_one_for_all_and_the_text_ends_by_the_wanted_length():
    rng = np.random.default_rng(0)
    for wanted in (30, 90, 300):
        asked = json.loads(body(50, wanted, rng))
        assert (asked["max_tokens"], asked["min_tokens"], len(asked["prompt"])) == (MAX_TOKENS, wanted - 1, 50)
        assert natural_length(seed_of(asked["seed"], array("q", asked["prompt"]))) <= wanted


def test_nothing_is_asked_for_beyond_the_cap():
    assert json.loads(body(5, 10_000, np.random.default_rng(0)))["min_tokens"] == MAX_TOKENS - 1
