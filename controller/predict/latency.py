"""Step latency from the shape of a batch: HyperFlexis eq. 1 (prefill), eq. 2 (decode), eq. 5 (token budget).

Lengths in tokens, results in seconds. For a prompt with a cached prefix of length `past`, new * (new + 2 * past)
replaces the square of its length, because that is the cost of attention over both.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from controller.core.types import LatencyCoefficients

UNBOUNDED = 1 << 40  # tokens; more than any queue holds
# For models without a profile: slow, so that the first requests are sent carefully; corrected online.
UNPROFILED = LatencyCoefficients(0.01, 2e-4, 0.0, 0.02, 1e-7, 3e-4)


class LatencyModel:
    """Step latency of one model on one kind of device."""

    __slots__ = ("coefficients",)

    def __init__(self, coefficients: LatencyCoefficients = UNPROFILED) -> None:
        self.coefficients = coefficients

    def prefill(self, new: Sequence[int], past: Sequence[int] = ()) -> float:
        """Eq. 1 for one prefill batch; an empty batch takes 0 s, not a."""
        if not new:
            return 0.0
        cached = past or (0,) * len(new)
        squares = sum(n * (n + 2 * p) for n, p in zip(new, cached, strict=True))
        return self.prefill_sums(sum(new), squares)

    def prefill_sums(self, tokens: int, squares: int) -> float:
        """Eq. 1, from the sums of lengths and of squares."""
        if tokens <= 0:
            return 0.0
        a, b, c = self.coefficients[:3]
        return a + b * tokens + c * squares

    def decode(self, batch: int, context_sum: int) -> float:
        """Eq. 2: seconds of a decode step of `batch` sequences of `context_sum` tokens in all; 0 for an empty batch."""
        if batch <= 0:
            return 0.0
        k = self.coefficients
        return k.decode_a + k.decode_b * context_sum + k.decode_c * batch

    def step(self, tokens: int, squares: int, batch: int, context_sum: int) -> float:
        """Seconds of a mixed step: the larger of the two constants and both linear parts (eq. 1 and 2 leave this
        open).
        """
        if tokens <= 0:
            return self.decode(batch, context_sum)
        if batch <= 0:
            return self.prefill_sums(tokens, squares)
        k = self.coefficients
        linear = k.prefill_b * tokens + k.prefill_c * squares + k.decode_b * context_sum + k.decode_c * batch
        return max(k.prefill_a, k.decode_a) + linear

    def marginal_decode(self, context: int, batch: float) -> float:
        """Engine seconds that one sequence adds with each token it decodes, in a batch of `batch`."""
        k = self.coefficients
        return k.decode_a / max(1.0, batch) + k.decode_b * context + k.decode_c

    def token_budget(self, ttft_s: float, tpot_s: float, decode_s: float, waiting_tokens: int = 0) -> int:
        """Eq. 5: prompt tokens of the next prefill batch that still meet both targets; never negative.

        `waiting_tokens` already wait in the engine and are part of that batch. If decode_s >= tpot_s, eq. 5 has no
        solution and the result is 0.
        """
        if decode_s >= tpot_s:
            return 0
        k = self.coefficients
        if math.isinf(ttft_s):
            return UNBOUNDED
        kept = 1.0 if math.isinf(tpot_s) else (tpot_s - decode_s) / tpot_s
        seconds = ttft_s * kept - k.prefill_a
        if seconds <= 0:
            return 0
        if k.prefill_b <= 0:
            return UNBOUNDED
        # An exact 5500 can be 5499.999... in floats: round up within a billionth of the next integer.
        return max(0, math.floor(seconds / k.prefill_b + 1e-6) - waiting_tokens)

    def maturity(self, prefill_s: float, decode_s: float, tpot_s: float) -> float:
        """Seconds until a batch is prefilled and amortised (Alg. 1): E_P + E_P / relax * E_d.

        Infinite if relax <= 0: then only an event (a running request ends) can make the worker mature.
        """
        if prefill_s <= 0:
            return 0.0
        if math.isinf(tpot_s):
            return prefill_s
        relax = tpot_s - decode_s
        if relax <= 0:
            return math.inf
        return prefill_s + prefill_s / relax * decode_s
