"""The requests that a gateway learns lengths from end where they should, and not because of what it could read."""

from __future__ import annotations

import json

import numpy as np

from benchmarks.analyzer.live import MAX_TOKENS, body


def test_the_cap_is_one_for_all_and_min_tokens_alone_tells_lengths_apart():
    asked = [json.loads(body(50, wanted, np.random.default_rng(0))) for wanted in (1, 30, 300)]
    assert [each.pop("min_tokens") for each in asked] == [0, 29, 299]
    assert asked[0] == asked[1] == asked[2]
    assert (asked[0]["max_tokens"], len(asked[0]["prompt"])) == (MAX_TOKENS, 50)


def test_nothing_is_asked_for_beyond_the_cap():
    assert json.loads(body(5, 10_000, np.random.default_rng(0)))["min_tokens"] == MAX_TOKENS - 1
