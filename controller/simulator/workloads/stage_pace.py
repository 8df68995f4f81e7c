"""How long stages take under the current load, learned from programs that have ended.

Concord derives the shares of a new program's stages, and what later stages need, from the execution times of similar
programs (sec. 4.1), which were observed under load and include waiting. The simulator's predictors only know tokens, so
what is learned here is how many times longer a stage takes than its tokens take alone. Only programs that met their
deadline are used: late ones waited until no other program needed the time, so their times do not show what a stage
needs.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from controller.core.errors import ConfigError

SPREAD = 0.3  # standard deviation over the mean, before anything was observed
DEVIATIONS = 1.28  # standard deviations below the mean: nine of ten are slower (as in the predictors' other bounds)
LEAST = 0.25  # of the mean


@dataclass(slots=True)
class StagePace:
    """`factor`: a stage's seconds over those of its longest call alone; `start` before anything was observed.

    Each program counts `weight` against all before it, so that old load is forgotten.
    """

    start: float = 1.25
    weight: float = 0.02
    factor: float = field(default=0.0, init=False)
    _square: float = field(default=0.0, init=False)

    def __post_init__(self) -> None:
        if not self.start > 0:
            raise ConfigError("start must be positive", field="start")
        if not 0 <= self.weight <= 1:
            raise ConfigError("weight must lie in [0, 1]", field="weight")
        self.factor = self.start
        self._square = self.start**2 * (1 + SPREAD**2)

    @property
    def lowest(self) -> float:
        """The factor that nine of ten programs exceed; whether a program is lost is judged by it."""
        deviation = math.sqrt(max(0.0, self._square - self.factor**2))
        return max(LEAST * self.factor, self.factor - DEVIATIONS * deviation)

    def observe(self, took_s: float, alone_s: float) -> None:
        """Learn from the stages of one program together, without their tools."""
        if alone_s > 0:
            found = took_s / alone_s
            self.factor += self.weight * (found - self.factor)
            self._square += self.weight * (found**2 - self._square)
