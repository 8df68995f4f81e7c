"""How long a tenant's requests reason at a model before they answer: seconds from the first token to the first one that
is not reasoning.

A mean and a mean deviation that follow what was measured, as TCP follows round trips (RFC 6298): cheap, and soon right
again after a change of the model or its load. There is one of each for a tenant and a model, both of the configuration.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

MEAN_SHARE, SPREAD_SHARE = 1 / 8, 1 / 4  # of a new value
# That are allowed beyond the mean: of values that scatter evenly about it, some 80 % take less. With more, requests
# that are likely to be in time would go behind all others as too late.
SPREADS = 1.0
LEAST_LEFT = 0.1  # of the thinking deadline: more than the rest is never taken to be reasoning


class ThinkingTimes:
    def __init__(self) -> None:
        self._found: dict[tuple[str, str], tuple[float, float]] = {}

    def observe(self, tenant: str, model: str, seconds: float) -> None:
        """A request has reasoned for so long."""
        mean, spread = self._found.get((tenant, model), (seconds, seconds / 2))
        spread += SPREAD_SHARE * (abs(seconds - mean) - spread)
        mean += MEAN_SHARE * (seconds - mean)
        self._found[tenant, model] = mean, spread

    def expected_s(self, tenant: str, model: str) -> float:
        """How long the next one may; 0 until one was seen."""
        mean, spread = self._found.get((tenant, model), (0.0, 0.0))
        return mean + SPREADS * spread

    def first_token_s(self, tenant: str, model: str, thinking_s: float) -> float:
        """Until when its first token must come for its reasoning to end by the thinking deadline."""
        return max(LEAST_LEFT * thinking_s, thinking_s - self.expected_s(tenant, model))

    def state(self) -> list[Any]:
        """All that was learned, as JSON can hold it."""
        return [[*key, mean, spread] for key, (mean, spread) in self._found.items()]

    def restore(self, state: Sequence[Any]) -> None:
        """Raises TypeError or ValueError, and changes nothing, for anything else than a state."""
        self._found = {
            (str(tenant), str(model)): (_seconds(mean), _seconds(spread)) for tenant, model, mean, spread in state
        }


def _seconds(raw: Any) -> float:
    found = float(raw)
    if not (math.isfinite(found) and found >= 0):
        raise ValueError("a number is no time")
    return found
