"""Samples tokens from logits. A draw depends only on the sequence's seed and the token's index, never on the batch."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from controller.core.steps import GREEDY, Sampling


@dataclass(frozen=True, slots=True)
class Draw:
    """How to choose output token number `index` of a sequence. `banned`: ids that must not be sampled yet."""

    sampling: Sampling = GREEDY
    seed: int = 0
    index: int = 0
    banned: tuple[int, ...] = ()

    @property
    def uniform(self) -> float:
        return random.Random(f"{self.seed}:{self.index}").random()


def sample(logits: torch.Tensor, draws: Sequence[Draw]) -> list[int]:
    """One token for each row of (rows, vocabulary) float32 logits."""
    for row, draw in enumerate(draws):
        if draw.banned:
            logits[row, list(draw.banned)] = -torch.inf
    tokens: list[int] = logits.argmax(dim=-1).tolist()
    for row, draw in enumerate(draws):
        if draw.sampling.temperature > 0:
            tokens[row] = _drawn(logits[row], draw)
    return tokens


def _drawn(logits: torch.Tensor, draw: Draw) -> int:
    """Apply the temperature, keep the `top_k` likeliest tokens, then the fewest of them whose probabilities reach
    `top_p`, and draw by inversion."""
    sampling = draw.sampling
    scaled = logits.double() / sampling.temperature
    most = min(sampling.top_k or len(scaled), len(scaled))
    ordered, ids = scaled.sort(descending=True, stable=True)
    reached = ordered[:most].softmax(dim=-1).cumsum(dim=-1)
    kept = int((reached < sampling.top_p).sum()) + 1  # including the token that reaches top_p
    reached = reached[:kept]
    at = torch.searchsorted(reached, draw.uniform * reached[-1].item(), right=True)
    return int(ids[min(int(at), len(reached) - 1)])
