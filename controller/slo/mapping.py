"""Priority-to-SLO mapping: latency targets from the relative importance of requests.

HyperFlexis (Yousefijamarani et al. 2025), sec. 5.2, Alg. 2, eq. 6. Where the paper is misprinted or silent: the windows
hold *measured* TTFT and TPOT; `last_queue_time[p]` is the queue time of the latest finished request of priority p; an
index beyond the window is clamped; without history the configured target applies; TTFT and TPOT have separate windows,
since an answer of one token has no TPOT. Cost per decision: O(levels).
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import deque
from collections.abc import Mapping, Sequence
from itertools import islice
from typing import Any, NamedTuple

from controller.core.snapshot import MappingConfig

LEVEL_WORTH = 0.5  # what attaining a request is worth, over the level above (decision 162)
CONTENTION_RULES = ("strict", "relax_to_next_higher", "relax_to_zero")


class Assigned(NamedTuple):
    """Targets of one request and how they were derived (for its decision)."""

    ttft_s: float
    tpot_s: float
    reason: str  # history | no_history
    reference_ttft_s: float | None
    queue_correction_s: float


def priority_index(priority: int, counts: Sequence[int]) -> int:
    """Eq. 6: index of a priority's reference in the sorted window, from 0 and clamped to the window.

    In integers, because floor(7/10 x 90) is 62 in floats. Raises ValueError for an empty window.
    """
    total = sum(counts)
    if total == 0:
        raise ValueError("an empty window has no index")
    base = sum(counts[:priority])
    offset = (priority + 1) * counts[priority] // (len(counts) + 1)
    return min(base + offset, total - 1)


class _MeasuredValues:
    """The newest measured values, bounded by count and age and read by rank: a queue and a sorted list."""

    def __init__(self, levels: int, size: int, age_s: float) -> None:
        self.counts = [0] * levels
        self._size = size
        self._age_s = age_s
        self._order: deque[tuple[float, int, float, float, int]] = deque()
        self._sorted: list[tuple[float, float, int]] = []  # value, queue time, serial
        self._serial = 0

    def add(self, level: int, value: float, queue_s: float, now: float) -> None:
        self._serial += 1
        self._order.append((now, level, value, queue_s, self._serial))
        insort(self._sorted, (value, queue_s, self._serial))
        self.counts[level] += 1
        self.evict(now)

    def evict(self, now: float) -> None:
        while self._order and (len(self._order) > self._size or self._order[0][0] < now - self._age_s):
            _, level, value, queue_s, serial = self._order.popleft()
            del self._sorted[bisect_left(self._sorted, (value, queue_s, serial))]
            self.counts[level] -= 1

    def at(self, index: int) -> tuple[float, float]:
        value, queue_s, _ = self._sorted[index]
        return value, queue_s

    def __len__(self) -> int:
        return len(self._sorted)

    def state(self, now: float, most: int) -> list[Any]:
        """[age in seconds, level, value, queue time] of the newest `most`, oldest first."""
        newest = list(islice(reversed(self._order), most))[::-1]
        return [[now - at, level, value, queue_s] for at, level, value, queue_s, _ in newest]


class PriorityMapper:
    """The mapping of one tenant, or of all. Level 0 is the most urgent; priorities beyond the last level map to it."""

    def __init__(self, config: MappingConfig) -> None:
        self.config = config
        levels = len(config.levels)
        self._ttft = _MeasuredValues(levels, config.window, config.window_age_s)
        self._tpot = _MeasuredValues(levels, config.window, config.window_age_s)
        self._last_queue: list[float | None] = [None] * levels

    def level(self, priority: int) -> int:
        return min(priority, len(self.config.levels) - 1)

    def value(self, level: int) -> float:
        """What attaining a request of this level is worth: 1 at the highest."""
        return LEVEL_WORTH**level

    def observe(self, level: int, ttft_s: float | None, tpot_s: float | None, queue_s: float, now: float) -> None:
        """Learn from a finished request of this level. All values in seconds.

        None: not measured. A request that was not streamed has no TTFT and only adds its queue time.
        """
        self._last_queue[level] = queue_s
        if ttft_s is not None:
            self._ttft.add(level, ttft_s, queue_s, now)
        if tpot_s is not None:
            self._tpot.add(level, tpot_s, queue_s, now)

    def state(self, now: float, most: int) -> dict[str, Any]:
        """The newest `most` values of each window, as JSON can hold them."""
        windows = {"ttft": self._ttft.state(now, most), "tpot": self._tpot.state(now, most)}
        return {"config": str(self.config), "last_queue": list(self._last_queue), **windows}

    def restore(self, state: Mapping[str, Any], now: float, since_s: float) -> None:
        """Go on from a state that was taken `since_s` ago; one of another configuration changes nothing. Raises
        KeyError, TypeError or ValueError for anything else than a state."""
        if state["config"] != str(self.config):
            return
        restored = PriorityMapper(self.config)
        for window, rows in ((restored._ttft, state["ttft"]), (restored._tpot, state["tpot"])):
            for age_s, level, value, queue_s in rows:
                window.add(int(level), float(value), float(queue_s), now - since_s - float(age_s))
            window.evict(now)
        last = [None if each is None else float(each) for each in state["last_queue"]]
        if len(last) != len(self._last_queue):
            raise ValueError("another number of levels")
        self._ttft, self._tpot, self._last_queue = restored._ttft, restored._tpot, last

    def assign(self, level: int, higher_pending: bool, now: float) -> Assigned:
        """Targets for a new request of this level (Alg. 2).

        Changes nothing, so calling it again gives the same targets.
        """
        bounds = self.config.levels[level]
        ttft, correction, reference = bounds.ttft_s, 0.0, None
        self._ttft.evict(now)
        self._tpot.evict(now)
        if len(self._ttft):
            reference, reference_queue = self._ttft.at(priority_index(level, self._ttft.counts))
            newest = self._last_queue[level]
            correction = reference_queue - newest if newest is not None else 0.0
            ttft = reference - correction
        tpot = bounds.tpot_s
        if len(self._tpot):
            tpot, _ = self._tpot.at(priority_index(level, self._tpot.counts))
        ttft_low, tpot_low = self._lower_bounds(level, higher_pending)
        return Assigned(
            ttft_s=min(max(ttft, ttft_low), bounds.ttft_max_s),
            tpot_s=min(max(tpot, tpot_low), bounds.tpot_max_s),
            reason="history" if reference is not None else "no_history",
            reference_ttft_s=reference,
            queue_correction_s=correction,
        )

    def _lower_bounds(self, level: int, higher_pending: bool) -> tuple[float, float]:
        """The contention rule: strict while a higher priority is queued, otherwise relaxed as configured."""
        bounds = self.config.levels[level]
        rule = self.config.contention
        if higher_pending or rule == "strict" or level == 0:
            return bounds.ttft_min_s, bounds.tpot_min_s
        if rule == "relax_to_next_higher":
            higher = self.config.levels[level - 1]
            return min(bounds.ttft_min_s, higher.ttft_min_s), min(bounds.tpot_min_s, higher.tpot_min_s)
        return 0.0, 0.0
