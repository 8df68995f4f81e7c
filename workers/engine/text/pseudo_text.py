"""The text of an emulated model: words drawn by the sequence's seed, and a natural end.

The n-th token of a sequence depends only on its seed and n, so preemption, batching and chunking cannot change a text.
The natural length is log-normal, median 128 tokens, sigma 0.8 (p90 357, mean 176), at least 1. That is similar to chat
answers in public traces; clients must not rely on it.
"""

from __future__ import annotations

import math
from array import array
from functools import lru_cache
from hashlib import blake2b
from statistics import NormalDist

from workers.engine.text.tokenizer import encode

MEDIAN_TOKENS = 128
SIGMA = 0.8
_TEXT = """
the and for are but not you all any can had her was one our out day get has him his how man new now old see two way who
boy did its let put say she too use dad mom run big end far few got hot law lot low own red set sit sky sun ten top try
war why yes yet act add age ago air arm art ask bad bag bed bit box bus buy car cut eat eye fly
"""
WORDS = _TEXT.split()
VOCABULARY = tuple(encode(f" {word}")[0] for word in WORDS)
_MASK = (1 << 64) - 1
_LENGTHS = NormalDist(math.log(MEDIAN_TOKENS), SIGMA)


def seed_of(seed: int, tokens: array[int]) -> int:
    """One 64-bit seed for a generation from the request's (or engine's) seed and its prompt."""
    digest = blake2b(digest_size=8, key=(seed & _MASK).to_bytes(8))
    digest.update(tokens.tobytes())
    return int.from_bytes(digest.digest())


def _mix(value: int) -> int:
    """A finaliser that spreads every input bit over all output bits (the public-domain SplitMix64 constants)."""
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)


def token_at(seed: int, index: int) -> int:
    return VOCABULARY[_mix((seed + (index + 1) * 0x9E3779B97F4A7C15) & _MASK) % len(VOCABULARY)]


@lru_cache(maxsize=8192)
def natural_length(seed: int) -> int:
    """Tokens until the model ends by itself, including the end-of-sequence token."""
    uniform = (_mix(seed) + 0.5) / (_MASK + 1)
    return max(1, round(math.exp(_LENGTHS.inv_cdf(uniform))))
