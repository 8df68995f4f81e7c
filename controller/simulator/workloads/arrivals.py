"""Arrival times and lengths of requests: seeded numpy generators, one per source.

Arrivals are renewal processes whose gaps are never truncated (truncated gaps would offer more load than specified).
Every source has a generator of its own, so that a change of one does not affect the others.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import numpy as np

from controller.core.errors import ConfigError

Law = Literal["normal", "lognormal", "gamma", "constant", "uniform"]
LAWS = ("normal", "lognormal", "gamma", "constant", "uniform")
MOST_REDRAWS = 10_000


@dataclass(frozen=True, slots=True)
class Lengths:
    """A distribution of token counts. `mean` and `std` are those before truncation to [low, high].

    "uniform" is over [low, high] and "constant" is the mean; both ignore `std`.
    """

    mean: float
    std: float
    low: int
    high: int
    law: Law = "normal"

    def __post_init__(self) -> None:
        if self.law not in LAWS:
            raise ConfigError(f"unknown law {self.law!r}; valid: {', '.join(LAWS)}", field="law")
        if not 1 <= self.low <= self.high:
            raise ConfigError(f"1 <= low <= high must hold, got {self.low} and {self.high}", field="low")
        if not self.mean > 0 or self.std < 0:
            raise ConfigError("mean must be positive and std not negative", field="mean")
        if self.law == "constant" and not self.low <= self.mean <= self.high:
            raise ConfigError("a constant must lie in [low, high]", field="mean")

    def draw(self, rng: np.random.Generator, count: int) -> np.ndarray:
        """`count` integer lengths; values outside the bounds are drawn again."""
        drawn = self._raw(rng, count)
        for _ in range(MOST_REDRAWS):
            outside = (drawn < self.low) | (drawn > self.high)
            if not outside.any():
                return np.asarray(np.rint(drawn), dtype=int)
            drawn[outside] = self._raw(rng, int(outside.sum()))
        raise ConfigError(f"hardly anything of {self} lies within its bounds", field="low")

    def _raw(self, rng: np.random.Generator, count: int) -> np.ndarray:
        if self.law == "normal":
            return rng.normal(self.mean, self.std, count)
        if self.law == "uniform":
            return rng.integers(self.low, self.high + 1, count).astype(float)
        if self.law == "constant" or self.std == 0:
            return np.full(count, float(self.mean))
        if self.law == "gamma":
            shape = (self.mean / self.std) ** 2
            return rng.gamma(shape, self.mean / shape, count)
        variance = math.log1p((self.std / self.mean) ** 2)
        return rng.lognormal(math.log(self.mean) - variance / 2, math.sqrt(variance), count)


def renewal_times(
    rng: np.random.Generator, rate: float, *, count: int | None = None, until_s: float = math.inf, cv: float = 1.0
) -> list[float]:
    """Arrival times of a renewal process: `count` of them, or all before `until_s`.

    Gaps are exponential for `cv` 1 (Poisson), constant for 0, gamma otherwise. `rate` in requests/s.
    """
    if not rate > 0 or cv < 0:
        raise ConfigError(f"rate must be positive and cv not negative, got {rate} and {cv}", field="rate")
    if count is None and math.isinf(until_s):
        raise ConfigError("an arrival process needs a count or a duration", field="duration_s")
    times: list[float] = []
    at = _gap(rng, rate, cv)
    while at < until_s and (count is None or len(times) < count):
        times.append(at)
        at += _gap(rng, rate, cv)
    return times


def _gap(rng: np.random.Generator, rate: float, cv: float) -> float:
    if cv == 1.0:
        return float(rng.exponential(1 / rate))
    if cv == 0.0:
        return 1 / rate
    shape = 1 / (cv * cv)
    return float(rng.gamma(shape, 1 / (rate * shape)))
