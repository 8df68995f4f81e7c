"""Expected output length of a request from what its kind produced lately, capped by its `max_tokens`.

A decaying mean per (tenant, class, model), then per (class, model), then per model. It changes only in `observe`.
The learned upper bound of Concord (a quantile forest) comes in beside it under its own name.
"""

from __future__ import annotations

DEFAULT_TOKENS = 128  # before anything has finished: between Table 1's shortest and longest mean of HyperFlexis
DECAY = 0.05  # weight of the newest answer


class OutputLengthModel:
    """Bounded: one pair of numbers per kind of traffic."""

    def __init__(self, default: int = DEFAULT_TOKENS, decay: float = DECAY) -> None:
        self._default = default
        self._decay = decay
        self._means: dict[tuple[str, ...], tuple[int, float]] = {}

    def predict(self, tenant: str, slo_class: str, model: str, max_tokens: int | None) -> int:
        """Expected output tokens, at least 1 and at most `max_tokens`."""
        expected = float(self._default)
        for key in ((tenant, slo_class, model), (slo_class, model), (model,)):
            known = self._means.get(key)
            if known is not None and known[0] >= 3:
                expected = known[1]
                break
        bound = max_tokens if max_tokens is not None and max_tokens > 0 else expected
        return max(1, round(min(expected, bound)))

    def observe(self, tenant: str, slo_class: str, model: str, output_tokens: int) -> None:
        """A request ended normally with this many tokens."""
        for key in ((tenant, slo_class, model), (slo_class, model), (model,)):
            count, mean = self._means.get(key, (0, 0.0))
            weight = max(self._decay, 1.0 / (count + 1))
            self._means[key] = (count + 1, mean + weight * (output_tokens - mean))
