import random

import pytest

from controller.predict.lengths import CachedShares

AGENTS, CHAT = ("t", "agents"), ("t", "chat")


def test_nothing_counts_as_cached_before_an_engine_counted_it():
    shares = CachedShares()
    shares.observe({CHAT: 1000}, 1000, 0)
    assert not shares
    assert shares.cached(CHAT, 1000) == 0


def test_shares_of_two_kinds_are_learned_from_one_counter():
    rng, shares = random.Random(1), CachedShares()
    for _ in range(200):
        prompts = {AGENTS: rng.randrange(500, 5000), CHAT: rng.randrange(500, 5000)}
        shares.observe(prompts, sum(prompts.values()), round(0.6 * prompts[AGENTS]))
    assert shares.cached(AGENTS, 1000) == pytest.approx(600, abs=20)
    assert shares.cached(CHAT, 1000) == pytest.approx(0, abs=20)


def test_a_cache_that_was_emptied_is_forgotten():
    shares = CachedShares()
    for _ in range(20):
        shares.observe({AGENTS: 1000}, 1000, 900)
    for _ in range(20):
        shares.observe({AGENTS: 1000}, 1000, 0)
    assert shares.cached(AGENTS, 1000) < 10


def test_prompts_that_an_engine_counts_in_another_interval_do_not_lower_a_share():
    """It counts a prompt when it admits it; here it counts once its first token is out, which may be later."""
    rng, shares, late = random.Random(3), CachedShares(), 0
    for _ in range(60):
        counted, after = rng.randrange(2000, 8000), rng.randrange(0, 2000)
        shares.observe({AGENTS: counted + late - after}, counted, round(0.6 * counted))
        late = after
    assert shares.cached(AGENTS, 1000) == pytest.approx(600, abs=20)


def test_prompts_of_other_gateways_are_taken_to_have_the_mean_share():
    rng, shares, found = random.Random(2), CachedShares(), []
    for _ in range(300):
        prompts, others = ({AGENTS: rng.randrange(500, 5000), CHAT: rng.randrange(500, 5000)} for _ in range(2))
        counted = sum(prompts.values()) + sum(others.values())
        shares.observe(prompts, counted, round(0.6 * (prompts[AGENTS] + others[AGENTS])))
        found.append((shares.cached(AGENTS, 1000), shares.cached(CHAT, 1000)))
    agents, chat = (sum(each) / len(found[50:]) for each in zip(*found[50:], strict=True))
    assert agents == pytest.approx(600, abs=60)
    assert chat == pytest.approx(0, abs=120)
