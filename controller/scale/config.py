"""The validated settings of a scaling policy. Whoever stores a ScalingPolicy builds this first."""

from __future__ import annotations

import math
from dataclasses import dataclass

from controller.core.errors import ConfigError


@dataclass(frozen=True, slots=True)
class ScalingConfig:
    """Bounds in instances, thresholds as load (1.0: the fleet is exactly full), times in seconds.

    Thresholds, hold and cool-down are ours, since HyperFlexis gives none. `interval_s` = 1 is the paper's tau, the best
    of 0.5, 1 and 2 s in its sec. 9.3. Raises ConfigError naming the field.
    """

    model: str
    role: str = "collocated"
    min_instances: int = 1
    max_instances: int = 4
    upper: float = 0.8  # above: scale out; what is left after a scale-in stays below this and below 1
    lower: float = 0.3  # below, for sustain_s: scale in
    sustain_s: float = 15.0
    cooldown_s: float = 10.0  # after any change, before the next
    interval_s: float = 1.0  # one tick; Celery beat ticks once a second, so a stored policy has at least 1

    def __post_init__(self) -> None:
        _require(bool(self.model), "model", "names the model whose instances are scaled")
        _require(self.min_instances >= 0, "min_instances", "must be 0 or more")
        _require(self.max_instances >= 1, "max_instances", "must be 1 or more")
        _require(self.max_instances >= self.min_instances, "max_instances", "must not be below min_instances")
        _require(math.isfinite(self.upper) and self.upper > 0, "upper", "must be a number above 0")
        _require(0 <= self.lower < self.upper, "lower", "must be 0 or more, and below upper")
        _require(math.isfinite(self.sustain_s) and self.sustain_s >= 0, "sustain_s", "must be 0 s or more")
        _require(math.isfinite(self.cooldown_s) and self.cooldown_s >= 0, "cooldown_s", "must be 0 s or more")
        _require(0.05 <= self.interval_s <= 60, "interval_s", "must be from 0.05 to 60 s")


def _require(holds: bool, field: str, what: str) -> None:
    if not holds:
        raise ConfigError(f"{field} {what}", field)
