"""Settings of a dispatcher."""

from __future__ import annotations

import math
from dataclasses import dataclass

from controller.core.errors import ConfigError

ENGINE_RANKS = ("none", "class", "deadline")


@dataclass(frozen=True, slots=True)
class DispatchConfig:
    """`engine_rank`: what the engine is told about urgency.

    `scan_limit`: requests looked at that do not fit before a pass ends (Alg. 1 scans the whole queue; a worker that is
    nearly full would cost O(n) for nothing).
    """

    engine_rank: str = "none"
    max_queue: int = 20_000
    max_attempts: int = 3
    scan_limit: int = 32
    refuse_infeasible: bool = True
    infeasible_margin: float = 1.2
    tightest_share: float = 0.05
    traffic_window_s: float = 30.0

    def __post_init__(self) -> None:
        if self.engine_rank not in ENGINE_RANKS:
            raise ConfigError(f"engine_rank must be one of {', '.join(ENGINE_RANKS)}", field="engine_rank")
        for name in ("max_queue", "max_attempts", "scan_limit"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be at least 1", field=name)
        for name in ("infeasible_margin", "traffic_window_s"):  # 0 would refuse all traffic, or forget it at once
            value = getattr(self, name)
            if not (math.isfinite(value) and value > 0):
                raise ConfigError(f"{name} must be a number above 0", field=name)
        if not 0 <= self.tightest_share < 1:
            raise ConfigError("tightest_share must lie in [0, 1)", field="tightest_share")
