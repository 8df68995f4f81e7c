"""Token goodput (Concord ch. 3) and cost (HyperFlexis eq. 3)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

PAPER_UNIT_S = 0.05  # HyperFlexis counts cost in units of 50 ms of one instance


def token_goodput(token_times: Sequence[float], ttft_s: float, tbt_s: float) -> int:
    """Tokens delivered by ttft + i x tbt, i from 0 for the first one; a late token does not spoil later ones.

    `token_times` are seconds after arrival.
    """
    return sum(at <= ttft_s + i * tbt_s + 1e-9 for i, at in enumerate(token_times))


def deadline_goodput(e2e_s: float, deadline_s: float, prompt_tokens: int, output_tokens: int) -> int:
    """Deadline and workflow requests: input and output tokens, all or nothing."""
    return prompt_tokens + output_tokens if e2e_s <= deadline_s + 1e-9 else 0


def cost(provisioned_s: Iterable[float], unit_cost: float = 1.0) -> float:
    """Eq. 3: provisioned seconds of every instance times the cost of one instance-second."""
    return sum(provisioned_s) * unit_cost
