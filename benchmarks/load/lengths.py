"""Answers whose length no field of a request tells.

`max_tokens` is one cap for all requests of a load. A real engine ends an answer at STOP_TOKEN, which `min_tokens`
forbids until the length is reached and a bias makes certain from then on. An emulated one ends by itself where its text
does, and not before `min_tokens`; the seed is chosen so that its text ends by then. No predictor sees `min_tokens`.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Any

from workers.engine.text.pseudo_text import natural_length, seed_of

STOP_TOKEN = 2  # the first plain byte: prompts do not contain it (`workloads.FIRST_PLAIN_TOKEN`)
SEEDS_TRIED = 256


def stopped(tokens: int, cap: int) -> dict[str, Any]:
    """Fields of a request to a real engine, for an answer of `tokens`, at most `cap`."""
    return {
        "max_tokens": cap,
        "min_tokens": tokens - 1,
        "stop_token_ids": [STOP_TOKEN],
        "logit_bias": {str(STOP_TOKEN): 100.0},
    }


def emulated(prompt: Sequence[int], tokens: int, cap: int) -> dict[str, Any]:
    """Fields of a request to an emulated engine, for an answer of `tokens`, or more where none of SEEDS_TRIED seeds
    has a text that ends by then; at most `cap`."""
    hashed = array("q", prompt)  # as the engine hashes it
    ends = ((natural_length(seed_of(seed, hashed)), seed) for seed in range(SEEDS_TRIED))
    seed = next((seed for length, seed in ends if length <= tokens), 0)
    return {"max_tokens": cap, "min_tokens": max(0, min(tokens, cap) - 1), "seed": seed, "ignore_eos": False}
