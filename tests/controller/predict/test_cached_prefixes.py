import random

import pytest

from controller.predict.lengths import CachedShares

AGENTS, CHAT = ("t", "agents"), ("t", "chat")


def test_nothing_counts_as_cached_before_an_engine_counted_it():
    shares = CachedShares()
    shares.observe({CHAT: 1000}, 0)
    assert not shares
    assert shares.cached(CHAT, 1000) == 0


def test_shares_of_two_kinds_are_learned_from_one_counter():
    rng, shares = random.Random(1), CachedShares()
    for _ in range(200):
        prompts = {AGENTS: rng.randrange(500, 5000), CHAT: rng.randrange(500, 5000)}
        shares.observe(prompts, 0.6 * prompts[AGENTS])
    assert shares.cached(AGENTS, 1000) == pytest.approx(600, abs=20)
    assert shares.cached(CHAT, 1000) == pytest.approx(0, abs=20)


def test_a_cache_that_was_emptied_is_forgotten():
    shares = CachedShares()
    for _ in range(20):
        shares.observe({AGENTS: 1000}, 900)
    for _ in range(20):
        shares.observe({AGENTS: 1000}, 0)
    assert shares.cached(AGENTS, 1000) < 10
