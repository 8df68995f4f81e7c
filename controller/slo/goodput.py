"""Token goodput (Concord ch. 3)."""

from __future__ import annotations

from collections.abc import Sequence


def token_goodput(token_times: Sequence[float], ttft_s: float, tbt_s: float) -> int:
    """Tokens delivered by ttft + i x tbt, i from 0 for the first one; a late token does not spoil later ones.

    `token_times` are seconds after arrival.
    """
    return sum(at <= ttft_s + i * tbt_s + 1e-9 for i, at in enumerate(token_times))


def deadline_goodput(e2e_s: float, deadline_s: float, prompt_tokens: int, output_tokens: int) -> int:
    """Deadline and workflow requests: input and output tokens, all or nothing."""
    return prompt_tokens + output_tokens if e2e_s <= deadline_s + 1e-9 else 0
