"""Online adaptation of CALM's cutoff p: try values and keep the best (Concord sec. 4.2; the rule is ours).

The paper adapts p by "exploring different thresholds" and does not say how. Here an epoch of `frames` uses one value.
After every value has had an epoch, the best one is used, and each `explore_every`-th epoch tries the next of the
others in turn. A value's score is a decaying mean of goodput per frame, so that old traffic is forgotten. Frames in
which nothing waited for a slot count for no value, since everybody ran whatever it was. Deterministic. Cost:
O(values) per epoch.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

DECAY = 0.5  # weight of an epoch in the score


class AdaptiveCutoff:
    def __init__(self, values: Sequence[float], frames: int = 40, explore_every: int = 5) -> None:
        self.values = tuple(values)
        self._frames = frames
        self._explore_every = explore_every
        self._scores: dict[float, float] = {}
        self._index = 0
        self._epoch = 0
        self._explored = 0
        self._began = 0
        self._earned = 0.0
        self._earned_before = 0.0  # this frame
        self._last = 0

    @property
    def value(self) -> float:
        return self.values[self._index]

    def state(self) -> dict[str, Any]:
        """All that was learned, as JSON can hold it. What this frame earned so far is not, and is lost with it."""
        return {
            "values": list(self.values),
            "rule": [self._frames, self._explore_every],
            "scores": [[value, score] for value, score in self._scores.items()],
            "epoch": [self._index, self._epoch, self._explored],
            "frames": [self._began, self._last],
            "earned": self._earned_before,
        }

    @classmethod
    def of(cls, state: Mapping[str, Any]) -> AdaptiveCutoff:
        """One that goes on from `state`. Raises KeyError, TypeError or ValueError for anything else than a state."""
        frames, explore_every = map(int, state["rule"])
        made = cls([_finite(each) for each in state["values"]], frames, explore_every)
        made._scores = {_finite(value): _finite(score) for value, score in state["scores"]}
        made._index, made._epoch, made._explored = map(int, state["epoch"])
        made._began, made._last = map(int, state["frames"])
        made._earned = made._earned_before = _finite(state["earned"])
        known = frames > 0 < explore_every and made._scores.keys() <= set(made.values)
        if not (known and 0 <= made._index < len(made.values) and 0 <= made._began <= made._last):
            raise ValueError("no state of a cutoff")
        return made

    def earned(self, goodput: float) -> None:
        self._earned += goodput

    def tick(self, frame: int, contested: bool = True) -> None:
        """Count the start of a frame. `contested`: something waited for a slot in those before it."""
        passed, self._last = frame - self._last, frame
        if not contested:
            self._began += passed
            self._earned = self._earned_before
            return
        self._earned_before = self._earned
        spent = frame - self._began
        if spent < self._frames:
            return
        score, before = self._earned / spent, self._scores.get(self.value)
        self._scores[self.value] = score if before is None else before + DECAY * (score - before)
        self._earned = self._earned_before = 0.0
        self._began = frame
        self._epoch += 1
        self._index = self._next()

    def _next(self) -> int:
        count = len(self.values)
        untried = [index for index, value in enumerate(self.values) if value not in self._scores]
        if untried:
            return untried[0]
        if self._epoch % self._explore_every == 0:
            self._explored += 1
            return self._explored % count
        return max(range(count), key=lambda index: (self._scores[self.values[index]], self.values[index]))


def _finite(raw: Any) -> float:
    """Raises TypeError or ValueError for anything else than a finite number."""
    if not math.isfinite(found := float(raw)):
        raise ValueError(f"{raw} is no finite number")
    return found
