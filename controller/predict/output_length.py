"""Expected output length from recent answers of the same kind of traffic, at most `max_tokens`.

A decaying mean per (tenant, class, model), then per (class, model), then per model. It changes only in `observe`.
"""

from __future__ import annotations

DEFAULT_TOKENS = 128  # before anything has finished; between the shortest and longest mean of HyperFlexis Table 1
DECAY = 0.05  # weight of the newest answer in the mean


class OutputLengthModel:
    """Memory is bounded: one pair of numbers for each kind of traffic."""

    def __init__(self, default: int = DEFAULT_TOKENS, decay: float = DECAY) -> None:
        self._default = default
        self._decay = decay
        self._means: dict[tuple[str, ...], tuple[int, float]] = {}

    def predict(self, tenant: str, slo_class: str, model: str, max_tokens: int | None) -> int:
        """Expected output tokens, from 1 to `max_tokens`."""
        expected = float(self._default)
        for key in ((tenant, slo_class, model), (slo_class, model), (model,)):
            known = self._means.get(key)
            if known is not None and known[0] >= 3:
                expected = known[1]
                break
        bound = max_tokens if max_tokens is not None and max_tokens > 0 else expected
        return max(1, round(min(expected, bound)))

    def observe(self, tenant: str, slo_class: str, model: str, output_tokens: int) -> None:
        """Learn from a request that ended normally with this many tokens."""
        for key in ((tenant, slo_class, model), (slo_class, model), (model,)):
            count, mean = self._means.get(key, (0, 0.0))
            weight = max(self._decay, 1.0 / (count + 1))
            self._means[key] = (count + 1, mean + weight * (output_tokens - mean))
