"""Draws: what they may be, how often, and that nothing but seed and number decides them."""

import math
from collections import Counter

import pytest
import torch
from transformers.generation.logits_process import TopKLogitsWarper, TopPLogitsWarper

from controller.engine import EngineScheduler
from controller.policies.batching import BATCHINGS
from tests.workers.engine.torch.bench import Bench, engine_config, folder, hot, program, prompts
from workers.engine.torch.model.sampling import Draw, sample

pytestmark = pytest.mark.torch
LOGITS = torch.tensor([2.0, 1.0, 0.0, -1.0, 1.5, -3.0])


def drawn(draws):
    return sample(LOGITS.repeat(len(draws), 1), draws)


def frequencies(sampling, count=4000):
    found = Counter(drawn([Draw(sampling, seed=3, index=index) for index in range(count)]))
    return [found[token] / count for token in range(len(LOGITS))]


def library_odds(sampling):
    scores = (LOGITS / sampling.temperature)[None]
    if sampling.top_k:
        scores = TopKLogitsWarper(sampling.top_k)(None, scores)
    if sampling.top_p < 1:
        scores = TopPLogitsWarper(sampling.top_p)(None, scores)
    return scores.softmax(-1)[0].tolist()


@pytest.mark.parametrize(
    "sampling",
    [hot(), hot(0.5), hot(2.0), hot(top_k=2), hot(top_p=0.7), hot(1.5, 4, 0.8), hot(top_k=1), hot(top_p=1e-9)],
)
@pytest.mark.sampled(3)
def test_tokens_come_as_often_as_the_library_would_draw_them(sampling):
    odds = library_odds(sampling)
    for found, wanted in zip(frequencies(sampling), odds, strict=True):
        assert found == pytest.approx(wanted, abs=4 * math.sqrt(max(wanted * (1 - wanted), 1e-9) / 4000))
        assert wanted > 0 or found == 0


def test_temperature_zero_is_the_likeliest_token():
    assert drawn([Draw(hot(0.0), seed=seed) for seed in range(20)]) == [0] * 20


def test_a_draw_depends_on_seed_and_number_alone():
    draws = [Draw(hot(), seed=seed, index=index) for seed in (1, 2) for index in range(40)]
    alone = [drawn([draw])[0] for draw in draws]
    assert drawn(draws) == alone
    assert alone[:40] != alone[40:]


def test_banned_tokens_never_come():
    assert 0 not in drawn([Draw(hot(0.0), banned=(0,)), *(Draw(hot(), seed=seed, banned=(0,)) for seed in range(99))])


def test_sampled_sequences_do_not_feel_their_neighbours():
    """Alone, batched, cut into chunks, recomputed: the same seeds draw the same text."""
    asked = prompts(6, seed=11, longest=16)

    def run(names, **settings):
        bench = Bench(
            program(folder(), settings.get("blocks", 64)),
            EngineScheduler(engine_config(**settings), BATCHINGS["chunked_prefill"]()),
        )
        for name in names:
            bench.add(str(name), asked[name], seed=name + 1, sampling=hot(0.9, 50, 0.95))
        tokens = bench.run()
        bench.close()
        return tokens, bench.scheduler.totals.preemptions

    together, _ = run(range(6))
    cut, recomputed = run(range(6), blocks=18, max_model_len=72, max_num_batched_tokens=8)
    assert recomputed > 0
    assert cut == together
    assert {name: run([int(name)])[0][name] for name in together} == together
    assert len({tuple(tokens) for tokens in together.values()}) == 6
