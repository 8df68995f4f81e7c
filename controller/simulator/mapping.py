"""Priority-mapped targets in a run: requests name only a priority (HyperFlexis sec. 5.2, Alg. 2).

Uses the gateway's `PriorityMapping` with the same inputs: the measured values of finished requests, and whether a
request of a higher priority is queued when a new one arrives.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from controller.core.snapshot import LevelBounds, MappingConfig
from controller.core.types import Targets
from controller.simulator.report.results import SimRecord
from controller.simulator.workloads.demand import Demand
from controller.slo.mapping import PriorityMapper


class MappedTargets:
    """Targets by priority over one run. They replace the request's own targets, except for its waiting time."""

    def __init__(self, config: MappingConfig) -> None:
        self._mapping = PriorityMapper(config)

    def assign(self, demand: Demand, pending_above: Callable[[int], bool], now: float) -> tuple[Targets, int, float]:
        """Targets, level and value of a request that arrives now."""
        level = self._mapping.level(demand.priority)
        given = self._mapping.assign(level, pending_above(level), now)
        targets = Targets(given.ttft_s, given.tpot_s, None, demand.targets.waiting_time_s)
        return targets, level, self._mapping.value(level)

    def ended(self, level: int, record: SimRecord, now: float) -> None:
        """Learn from an answered request: its measured values, and how long it was queued."""
        self._mapping.observe(level, record.ttft_s, record.tpot_s, record.queue_s or 0.0, now)


def around(
    targets: Sequence[tuple[float, float]], spread: float = 0.25, *, window: int = 1000, window_age_s: float = 300.0
) -> MappingConfig:
    """A mapping with one level for each (TTFT, TPOT), most urgent first, with bounds +- `spread` (sec. 7.3)."""
    levels = tuple(
        LevelBounds(ttft, tpot, *(bound * x for x in (ttft, tpot) for bound in (1 - spread, 1 + spread)))
        for ttft, tpot in targets
    )
    return MappingConfig(None, levels, window, window_age_s)
