"""How urgent a flow is: minimal link utilisation for explicit deadlines, relative layer index for implicit ones.

MFS sec. 4.3 and 4.4.1; worked examples M1 to M3.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

MOST_LOAD = 0.95  # of a port that other flows are counted with by default: more would make every flow infinitely urgent


def minimal_link_utilisation(
    left_bytes: float, time_left_s: float, bandwidth: float, load: float, most_load: float = MOST_LOAD
) -> float:
    """The share of the port's free bandwidth that the rest needs to be in time (MLU). Infinite without time left, and
    where nothing is free.

    `bandwidth` in bytes/s, `load` is the share of it that others take, counted up to `most_load`. Above 1 the deadline
    cannot be kept.
    """
    if left_bytes <= 0:
        return 0.0
    free = _free(bandwidth, load, most_load)
    if time_left_s <= 0 or free <= 0:
        return math.inf
    return left_bytes / (time_left_s * free)


def promotion_thresholds(levels: int, scale: float, ratio: float) -> tuple[float, ...]:
    """Q_1 > Q_2 > ... > Q_(K-1), Q_i = `scale` x `ratio`^-i: equal ratios have the smallest worst relative error.

    Reading: a flow belongs to level 1 above Q_1, to level i above Q_i, and to level K at or below Q_(K-1) (M2).
    """
    return tuple(scale * ratio**-i for i in range(1, levels))


def level_of(utilisation: float, thresholds: Sequence[float]) -> int:
    """The level of a flow with this MLU, 1 (most urgent) to K = len(thresholds) + 1."""
    for level, threshold in enumerate(thresholds, start=1):
        if utilisation > threshold:
            return level
    return len(thresholds) + 1


def crossing_at(
    left_bytes: float,
    deadline: float,
    bandwidth: float,
    load: float,
    thresholds: Sequence[float],
    level: int,
    most_load: float = MOST_LOAD,
) -> float:
    """When a flow that does not move leaves `level` for the next one up: infinite at level 1, and minus infinity where
    nothing is free."""
    if level <= 1 or left_bytes <= 0:
        return math.inf
    free = _free(bandwidth, load, most_load)
    return deadline - left_bytes / (thresholds[level - 2] * free) if free > 0 else -math.inf


def _free(bandwidth: float, load: float, most_load: float) -> float:
    return bandwidth * (1.0 - min(max(load, 0.0), most_load))


def relative_layer_index(target_layer: int, current_layer: int) -> int:
    """RLI: how many layers are computed before the one that consumes the flow; 0 stalls the computing now.

    `current_layer` of a batch that waits for its unit is negative by the layers ahead of it. What an already computed
    layer would have consumed counts as 0.
    """
    return max(0, target_layer - current_layer)
