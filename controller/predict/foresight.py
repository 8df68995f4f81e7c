"""Length predictors for experiments: the mean, or the truth with a stated error.

Neither learns. Concord sec. 4.1 has a quantile forest for lengths and pattern graphs for programs; these stand in for
both, so that the result of a policy can be separated from that of a predictor. All draws depend only on a name and a
seed.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from controller.core.errors import ConfigError
from controller.core.noise import standard_normal

REFINED_EVERY = 50  # tokens, Concord sec. 4.1


@dataclass(frozen=True, slots=True)
class KnownLength:
    output_tokens: int

    def upper(self, produced: int) -> int:
        return max(self.output_tokens, produced + 1)

    lower = upper


@dataclass(frozen=True, slots=True)
class MeanLength:
    """Predicts the mean length for everybody: no predictor (Concord Fig. 6.7's ablation)."""

    mean: int

    def upper(self, produced: int) -> int:
        return max(self.mean, produced + 1)

    def lower(self, produced: int) -> int:
        return produced + 1


@dataclass(slots=True)
class NoisyBounds:
    """A quantile prediction with lognormal error, refined every 50 tokens.

    The *remaining* length is predicted as remaining x exp(error x (z + quantile)). `quantile` is in standard
    deviations: at 1.28 nine of ten upper bounds hold (lower bounds with -quantile). z is drawn again for each
    refinement, and half of its variance is common to all refinements of a request. So the bounds tighten in tokens as
    the answer grows.
    """

    name: str
    output_tokens: int
    error: float
    quantile: float
    seed: int
    _known: int = field(default=-1, init=False)  # the refinement for which `_z` was drawn
    _z: float = field(default=0.0, init=False)

    def upper(self, produced: int) -> int:
        return self._bound(produced, self.quantile)

    def lower(self, produced: int) -> int:
        return self._bound(produced, -self.quantile)

    def _bound(self, produced: int, deviations: float) -> int:
        known = produced // REFINED_EVERY
        if known != self._known:
            self._known = known
            own, fresh = (standard_normal(name, self.seed) for name in (self.name, f"{self.name}@{known}"))
            self._z = math.sqrt(0.5) * (own + fresh)
        at = known * REFINED_EVERY
        remaining = max(1, self.output_tokens - at)
        return max(produced + 1, at + math.ceil(remaining * math.exp(self.error * (self._z + deviations))))


def checked_error(error: float, field: str = "error") -> float:
    """The value; raises ConfigError unless it is a finite number of at least 0."""
    if not 0 <= error < math.inf:
        raise ConfigError(f"{field} must be a number of at least 0", field=field)
    return error
