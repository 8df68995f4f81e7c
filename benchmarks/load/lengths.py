"""Answers whose length no field of a request tells.

`max_tokens` is one cap for all requests of a load. An answer ends at a stop token, which `min_tokens` forbids until the
length is reached. A real engine gets one such token and a bias that makes it certain from then on; to an emulated one,
whose next token nothing changes, every word is one. No predictor sees `min_tokens`.
"""

from __future__ import annotations

from typing import Any

from workers.engine.text.pseudo_text import VOCABULARY

STOP_TOKEN = 2  # the first plain byte: prompts do not contain it (`workloads.FIRST_PLAIN_TOKEN`)


def stopped(tokens: int, cap: int) -> dict[str, Any]:
    """Fields of a request to a real engine, for an answer of `tokens`, at most `cap`."""
    return {**_length(tokens, cap), "stop_token_ids": [STOP_TOKEN], "logit_bias": {str(STOP_TOKEN): 100.0}}


def emulated(tokens: int, cap: int) -> dict[str, Any]:
    """The same for an emulated engine."""
    return {**_length(tokens, cap), "stop_token_ids": sorted(set(VOCABULARY)), "ignore_eos": True}


def _length(tokens: int, cap: int) -> dict[str, int]:
    return {"max_tokens": cap, "min_tokens": max(0, min(tokens, cap) - 1)}
